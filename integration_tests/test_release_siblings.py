"""Tests with siblings of other releases are planned from history, by uv's resolver."""

import subprocess
import sys
from pathlib import Path

import pytest
from harness.toy_repository import ToyRepository
from interfaces import pieces
from interfaces.__main__ import main
from interfaces.api import check
from interfaces.manifest import read_manifests
from interfaces.repository import build
from interfaces.siblings import DIST, compat, forward, released

# No index has what is not ours: it is left out.
NEEDS = ["tw-a>=0.1,<0.2", "no-such-thing>=1"]


def stems(run):
    return sorted(Path(path).name.split("-py3")[0] for path in run["wheels"])


def build_now(toy, *names):
    for name in names:
        build(toy.root / "packages" / name, toy.root / DIST, "--wheel")


@pytest.fixture
def toy(tmp_path):
    """Has tw-a 0.1.1, and tw-b 0.1.0 that needs it, each a version ahead."""
    repository = ToyRepository.create(tmp_path / "toy")
    repository.released("tw-a", "0.1.1")
    repository.released("tw-b", "0.1.0", NEEDS)
    repository.package("tw-a", "0.1.2")
    repository.package("tw-b", "0.1.1", NEEDS)
    repository.commit()
    build_now(repository, "tw-a", "tw-b")
    return repository


@pytest.mark.parametrize(
    ("need", "said"),
    [
        ("tw-a>=0.3", r"only tw-a<=0\.1\.2 is available.*tw-a>=0\.3"),
        ("tw-lost", r"tw-lost\s+was\s+not\s+found\s+in\s+the\s+provided"),
    ],
)
def test_what_nothing_meets_is_told_and_no_index_asked(toy, tmp_path, need, said):
    toy.package("tw-b", "0.1.1", [need])
    build_now(toy, "tw-b")
    with pytest.raises(ValueError, match=f"(?s){said}"):
        compat(toy.root, "tw-b", tmp_path / "into")


@pytest.mark.slow
def test_compat_takes_the_oldest_releases_of_extras_too(toy, tmp_path):
    toy.released("tw-c", "0.1.0", ["tw-a>=0.1"])
    toy.package("tw-c", "0.1.1", ["tw-a>=0.1"])
    toy.package("tw-b", "0.1.1", NEEDS, ["tw-c>=0.1"])
    build_now(toy, "tw-b", "tw-c")
    [run] = compat(toy.root, "tw-b", tmp_path / "1")
    assert stems(run) == ["tw_a-0.1.1", "tw_b-0.1.1", "tw_c-0.1.0"]
    toy.package("tw-b", "0.1.1", NEEDS, ["tw-c>=0.2"])
    build_now(toy, "tw-b")
    with pytest.raises(ValueError, match=r"tw-c>=0\.2"):
        compat(toy.root, "tw-b", tmp_path / "2")


@pytest.mark.slow
def test_forward_prefers_released_siblings_to_those_of_the_checkout(toy, tmp_path):
    needs = ["tw-a>=0.1", "tw-b>=0.1"]
    toy.released("tw-c", "0.1.0", needs)
    toy.package("tw-c", "0.1.1", needs)
    build_now(toy, "tw-c")
    _, run = forward(toy.root, "tw-a", tmp_path / "1")
    assert stems(run) == ["tw_a-0.1.2", "tw_b-0.1.0", "tw_c-0.1.0"]
    toy.package("tw-a", "0.2.0")  # which the released tw-b excludes
    toy.package("tw-b", "0.2.0", ["tw-a>=0.2"])
    build_now(toy, "tw-a", "tw-b")
    [run] = forward(toy.root, "tw-a", tmp_path / "2")
    assert stems(run) == ["tw_a-0.2.0", "tw_b-0.2.0", "tw_c-0.1.0"]


def test_a_shallow_clone_is_not_enough(toy, tmp_path, monkeypatch, capsys):
    clone = tmp_path / "clone"
    toy.git("clone", "--quiet", "--depth", "1", toy.root.as_uri(), clone)
    monkeypatch.chdir(clone)
    assert main(["forward", "tw-a", str(tmp_path)]) == 1
    assert "git fetch --unshallow" in capsys.readouterr().err


INNER = "def inner(): ...\n"
OF_FRONT = "import tw_core\n\ndef work():\n    tw_core.work()\n"
OF_INTERNAL = "from tw_core.internal import inner\n\ndef work():\n    inner()\n"
RENAMED = "def more(): ...\n"
# What changes in tw-core -> its face, the new version, the bounds of both importers,
# the version that api asks for, and what the sessions say.
CHANGES = {
    "internal in a minor version": (
        *("internal", "1.1.0", ">=1.1,<1.2", ">=1.0,<2", ""),
        {"compat": "- green", "forward": "- green", "released": "green"},
    ),
    "internal in a patch": (
        *("internal", "1.0.1", ">=1.0,<1.1", ">=1.0,<2", "1.1.0"),
        {"compat": "red green", "forward": "red green", "released": "green"},
    ),
    "public in a minor version": (
        *("__init__", "1.1.0", ">=1.0,<1.2", ">=1.0,<2", "2.0.0"),
        {"compat": "green red", "forward": "- red", "released": "red"},
    ),
    "public in a major version": (
        *("__init__", "2.0.0", ">=2.0,<2.1", ">=2.0,<3", ""),
        {"compat": "- -", "forward": "- -", "released": "red"},
    ),
}


SESSIONS = ((compat, "tw-deep"), (compat, "tw-flat"), (forward, "tw-core"))


def light(command, wheels):
    """Runs a program with wheels, which Python imports as they are."""
    env = {"PYTHONPATH": ":".join(map(str, wheels))}
    return "red" if subprocess.run(command, env=env).returncode else "green"


def lights(runs):
    """The outcome of the tests of tw-deep and of tw-flat; ``-`` where none are run."""
    seen = {
        run["package"]: light(
            [sys.executable, f"{run['root']}/packages/{run['package']}/tests/test.py"],
            run["wheels"],
        )
        for run in runs
    }
    return f"{seen.get('tw-deep', '-')} {seen.get('tw-flat', '-')}"


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_the_sessions_see_a_change_of_a_face_that_the_bounds_do_not_tell(
    tmp_path, what, capsys
):
    face, version, deep, flat, due, seen = CHANGES[what]
    toy = ToyRepository.create(tmp_path / "toy")
    toy.package("tw-core", "1.0.0")
    toy.write("tw-core", INNER, "internal")
    readme = toy.root / "packages" / "tw-core" / "README.md"
    readme.write_text("```python\nimport tw_core\n\ntw_core.work()\n```\n")
    toy.released("tw-core", "1.0.0")
    for name, source, bound in (
        ("tw-deep", OF_INTERNAL, ">=1.0,<1.1"),
        ("tw-flat", OF_FRONT, ">=1.0,<2"),
    ):
        tests = toy.package(name, "1.0.0") / "tests"
        toy.write(name, source)
        tests.mkdir()
        module = name.replace("-", "_")
        (tests / "test.py").write_text(f"import {module}\n\n{module}.work()\n")
        toy.released(name, "1.0.0", [f"tw-core{bound}"])

    toy.package("tw-core", version)
    toy.write("tw-core", RENAMED, face)
    if face == "internal":
        toy.write("tw-deep", OF_INTERNAL.replace("inner", "more"))
    else:
        toy.write("tw-flat", OF_FRONT.replace("core.work", "core.more"))
    for name, bound in (("tw-deep", deep), ("tw-flat", flat)):
        toy.package(name, "1.0.1", [f"tw-core{bound}"])
    build_now(toy, "tw-core", "tw-deep", "tw-flat")
    toy.freeze("tw-core")

    said = check(toy.root, read_manifests(toy.root)["tw-core"])
    assert (f"must be {due} or higher; got {version}." in said) == bool(due), said
    capsys.readouterr()
    runs = [
        plan(toy.root, package, tmp_path / f"{plan.__name__}-{package}")
        for plan, package in (*SESSIONS, (compat, "tw-core"), (forward, "tw-flat"))
    ]
    released(toy.root, tmp_path / "tree")
    page = tmp_path / "tree" / "packages" / "tw-core" / "README.md"
    [command] = pieces.commands(page, tmp_path)
    assert seen == {
        "compat": lights(runs[0] + runs[1]),
        "forward": lights(runs[2]),
        "released": light(command, (toy.root / DIST).glob("tw_core-*.whl")),
    }
    assert runs[3:] == [[], []]
    said = capsys.readouterr().out
    assert (
        "tw-core: needs no sibling.\ntw-flat: no released package needs it.\n" in said
    )
    none = "no earlier release of a sibling is in its bounds."
    assert said.count(none) == seen["compat"].count("-")
    assert said.count("; nothing to prove.") == seen["forward"].count("-")
