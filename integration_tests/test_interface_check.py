"""The check of an interface fails when it should, on a repository with a release."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interfaces.api import check
from interfaces.manifest import read_manifests
from interfaces.toy_repository import WORK, ToyRepository

CHANGES = {
    "a removed function": ("", "0.2.0"),
    "a new required argument": (WORK.replace("(", "(a: int, "), "0.2.0"),
    "a renamed keyword": (WORK.replace("size", "count"), "0.2.0"),
    "a changed default": (WORK.replace("= 1", "= 2"), "0.2.0"),
    "a changed type": (WORK.replace("-> int", "-> float"), "0.2.0"),
    "an addition": (WORK + "\n\ndef more() -> None: ...\n", "0.1.1"),
}


@pytest.fixture
def toy(tmp_path):
    """A repository with tw-a 0.1.0 released."""
    repository = ToyRepository.create(tmp_path / "toy")
    repository.released("tw-a", "0.1.0")
    return repository


def change(repository, source):
    folder = repository.root / "packages" / "tw-a" / "src" / "tw_a"
    names = [name for name in ("work", "more") if f"def {name}(" in source]
    (folder / "_work.py").write_text(source or "\n")
    init = f"from tw_a._work import {', '.join(names)}\n" if names else ""
    (folder / "__init__.py").write_text(f"{init}__all__ = {names}\n")


def checked(repository):
    manifest = read_manifests(repository.root)["tw-a"]
    return check(repository.root, manifest)


def test_a_release_agrees_with_itself(toy):
    assert checked(toy) == ""


@pytest.mark.parametrize("what", CHANGES)
def test_code_that_its_file_does_not_have_is_a_fault(toy, what):
    change(toy, CHANGES[what][0])
    said = checked(toy)
    assert "tw-a: api.txt (-) and the code (+) differ" in said
    assert 'nox -s "api(tw-a)" -- --write' in said
    assert [line for line in said.splitlines() if line.startswith(("- def", "+ def"))]


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_in_the_file_too_needs_the_version_that_is_due(toy, what):
    source, due = CHANGES[what]
    change(toy, source)
    toy.freeze("tw-a")
    assert f"the version must be {due} or higher" in checked(toy)
    toy.commit("Change")
    assert f"the version must be {due} or higher" in checked(toy)
    toy.package("tw-a", due)
    assert checked(toy) == ""


def test_a_breaking_change_is_not_content_with_a_patch(toy):
    change(toy, CHANGES["a removed function"][0])
    toy.freeze("tw-a")
    toy.package("tw-a", "0.1.1")
    assert "- def tw_a.work(size: int = 1) -> int" in checked(toy)
    said = "must be 0.2.0 or higher; got 0.1.1. Raise it in pyproject.toml."
    assert said in checked(toy)


def test_the_last_release_counts_and_not_the_first(toy):
    change(toy, CHANGES["a removed function"][0])
    toy.released("tw-a", "0.2.0")
    assert checked(toy) == ""


def test_without_an_earlier_release_there_is_nothing_to_compare(tmp_path, capsys):
    repository = ToyRepository.create(tmp_path / "new")
    repository.package("tw-a", "0.1.0")
    repository.freeze("tw-a")
    repository.commit("Add")
    assert checked(repository) == ""
    assert "tw-a: no earlier release to compare with." in capsys.readouterr().out


@pytest.fixture(params=["a shallow clone", "an archive", "an archive in another"])
def without_history(toy, tmp_path, request):
    toy.commit("Later")
    outer = tmp_path
    if "in another" in request.param:
        outer = ToyRepository.create(tmp_path / "another").root
    copy = ToyRepository(outer / "copy")
    if "archive" in request.param:
        toy.export("HEAD", copy.root)
    else:
        source = toy.root.as_uri()
        toy.git("clone", "--quiet", "--depth", "1", source, str(copy.root))
    return copy


def test_without_history_the_file_alone_is_compared(without_history, capsys):
    assert checked(without_history) == ""
    said = capsys.readouterr().out
    assert said.startswith("tw-a: NOT compared with a release: ")
    assert "git fetch --unshallow" in said or "not a git repository" in said
    change(without_history, CHANGES["a changed default"][0])
    assert "the code (+) differ" in checked(without_history)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["tw-a"], 0, "compared with tw-a 0.1.0"),
        (["tw-b"], 1, "no package 'tw-b'; it must be one of tw-a"),
    ],
)
def test_the_command_tells_by_its_status(toy, arguments, status, said):
    done = subprocess.run(
        [sys.executable, "-m", "interfaces.api", *arguments],
        cwd=toy.root,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status
    assert said in done.stdout + done.stderr


def test_the_command_writes_the_file(toy):
    change(toy, CHANGES["an addition"][0])
    toy.package("tw-a", "0.1.1")
    assert checked(toy)
    toy.freeze("tw-a")
    text = (toy.root / "packages" / "tw-a" / "api.txt").read_text()
    assert text.endswith(
        "def tw_a.more() -> None\ndef tw_a.work(size: int = 1) -> int\n"
    )
    assert checked(toy) == ""
