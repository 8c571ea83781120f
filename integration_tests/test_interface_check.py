"""A change of an interface demands its file and its version, by what it breaks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interfaces.api import change_between, check, complaint, difference, due_part
from interfaces.api_lines import load
from interfaces.manifest import read_manifests
from interfaces.toy_repository import WORK, ToyRepository
from packaging.version import Version

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
    """Rewrites tw-a's module, and the stub that exports its functions."""
    repository.write_work("tw-a", source or "\n")
    names = [name for name in ("work", "more") if f"def {name}(" in source]
    lines = [f"from tw_a._work import {name} as {name}\n" for name in names]
    folder = repository.root / "packages" / "tw-a" / "src" / "tw_a"
    (folder / "__init__.pyi").write_text("".join(lines))
    (folder / "__init__.py").write_text("")


def checked(repository):
    manifest = read_manifests(repository.root)["tw-a"]
    return check(repository.root, manifest)


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_needs_its_line_in_the_file_and_the_version_that_is_due(toy, what):
    assert checked(toy) == ""
    source, due = CHANGES[what]
    change(toy, source)
    said = checked(toy)
    assert "tw-a: api.txt (-) and the code (+) differ" in said
    assert 'nox -s "api(tw-a)" -- --write' in said
    assert [line for line in said.splitlines() if line.startswith(("- def", "+ def"))]
    toy.freeze("tw-a")
    assert f"the version must be {due} (part " in checked(toy)
    toy.commit("Change")
    assert f"the version must be {due} (part " in checked(toy)
    toy.package("tw-a", due)
    assert checked(toy) == ""


def test_a_breaking_change_is_not_content_with_a_patch(toy):
    change(toy, CHANGES["a removed function"][0])
    toy.freeze("tw-a")
    toy.package("tw-a", "0.1.1")
    said = checked(toy)
    assert "- def tw_a.work(size: int = 1) -> int" in said
    assert "griffe: `work`: *Public object was removed*" in said
    assert "must be 0.2.0 (part minor) or higher; got 0.1.1." in said


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


@pytest.mark.parametrize("kind", ["shallow clone", "archive", "archive in another"])
def test_without_history_the_file_alone_is_compared(toy, tmp_path, kind, capsys):
    toy.commit("Later")
    outer = tmp_path
    if "in another" in kind:
        outer = ToyRepository.create(tmp_path / "another").root
    copy = ToyRepository(outer / "copy")
    if "archive" in kind:
        toy.export("HEAD", copy.root)
    else:
        toy.git("clone", "--quiet", "--depth", "1", toy.root.as_uri(), copy.root)
    assert checked(copy) == ""
    said = capsys.readouterr().out
    assert said.startswith("tw-a: NOT compared with a release: ")
    assert "git fetch --unshallow" in said or "not a git repository" in said
    change(copy, CHANGES["a changed default"][0])
    assert "the code (+) differ" in checked(copy)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["tw-a"], 0, "compared with tw-a 0.1.0"),
        (["tw-b"], 1, "no package 'tw-b'; it must be one of tw-a"),
    ],
)
def test_the_command_fails_where_the_check_does(toy, arguments, status, said):
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


PREAMBLE = """
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, overload
"""
OVERLOADS = "@overload\ndef work(a: {}): ...\n@overload\ndef work(a: str): ...\n"
OVERLOADS += "def work(a): ..."
SETTER = " @f.setter\n def f(self, v): ..."
PROPERTY = "class work:\n @property\n def f(self): ...\n{}"
CLASS = "{}class work{}:\n a: int\n{}"
# What changes -> before, after, and whether griffe, too, calls it breaking.
BREAKING = {
    "required argument": ("def work(a=1): ...", "def work(b, a=1): ...", True),
    "optional argument": ("def work(a=1): ...", "def work(a=1, b=2): ...", False),
    "default's constant": ("L=1\ndef work(a=L): ...", "L=2\ndef work(a=L): ...", False),
    "argument's type": ("def work(a: int): ...", "def work(a: str): ...", False),
    "overload": (OVERLOADS.format("int"), OVERLOADS.format("bytes"), False),
    "kind": ("def work(): ...", "class work: ...", True),
    "value": ("work = 3", "work = 4", False),
    "alias": ("work: TypeAlias = 'int'", "work: TypeAlias = 'str'", False),
    "other base": ("class work(ValueError): ...", "class work(KeyError): ...", False),
    "field": (
        CLASS.format("@dataclass\n", "", ""),
        CLASS.format("@dataclass\n", "", " b: int"),
        True,
    ),
    "tuple's field": (
        CLASS.format("", "(NamedTuple)", ""),
        CLASS.format("", "(NamedTuple)", " b: int"),
        False,
    ),
    "frozen": (
        CLASS.format("@dataclass(frozen=True)\n", "", ""),
        CLASS.format("@dataclass\n", "", ""),
        False,
    ),
    "inherited method": (
        "class _B:\n def f(self): ...\nclass work(_B): ...",
        "class _B: ...\nclass work(_B): ...",
        True,
    ),
    "setter": (PROPERTY.format(SETTER), PROPERTY.format(""), False),
}


@pytest.mark.parametrize("what", BREAKING)
def test_what_may_break_a_caller_demands_a_minor_version(what, tmp_path):
    *sources, is_seen_by_griffe = BREAKING[what]
    packages = []
    for folder, source in zip(("old", "new"), sources, strict=True):
        package = tmp_path / folder / "toy"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "__init__.pyi").write_text("from toy._work import work as work\n")
        (package / "_work.py").write_text(f"{PREAMBLE}\n{source}\n")
        packages.append(load("toy", package.parent))
    change = change_between(*packages)
    assert due_part(Version("0.1.0"), change) == "minor"
    assert any(line.startswith("griffe") for line in change) == is_seen_by_griffe
    assert change_between(packages[0], packages[0]) == []


@pytest.mark.parametrize(
    ("last", "change", "due", "too_low"),
    [
        ("0.1.0", [], "0.1.0", "0.0.9"),
        ("0.1.0", ["+ a"], "0.1.1", "0.1.0"),
        ("0.1.4", ["- a", "+ b"], "0.2.0", "0.1.5"),
        ("0.1.4", ["griffe: a"], "0.2.0", "0.1.9"),
        ("1.2.3", ["+ a"], "1.2.4", "1.2.3"),
        ("1.2.3", ["- a"], "2.0.0", "1.3.0"),
    ],
)
def test_a_version_below_the_one_that_is_due_is_refused(last, change, due, too_low):
    assert complaint(Version(last), Version(due), change) == ""
    said = complaint(Version(last), Version(too_low), change)
    assert f"{too_low}, which is below" in said or f"must be {due} (part " in said
    assert all(line in said for line in change)


def test_the_difference_names_every_line_that_only_one_side_has():
    assert difference(["a", "b", "d"], ["b", "c", "d"]) == ["- a", "+ c"]
    assert difference(["a"], ["a"]) == []
