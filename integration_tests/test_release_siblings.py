"""Tests with siblings of other releases are planned from history, by uv's resolver."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from interfaces import pieces
from interfaces.__main__ import main
from interfaces.api import check
from interfaces.manifest import read_manifests
from interfaces.repository import build
from interfaces.siblings import DIST, compat, forward, released
from toy_repository import ToyRepository

# No index has what is not ours: it is left out.
NEEDS = ["tw-a>=0.1,<0.2", "no-such-thing>=1"]


def stems(run):
    return sorted(Path(path).name.split("-py3")[0] for path in run["wheels"])


def build_now(toy, *names):
    for name in names:
        build(toy.root / "packages" / name, toy.root / DIST, "--wheel")


@pytest.fixture
def toy(tmp_path):
    """Has tw-a 0.1.0 and 0.1.1, and tw-b 0.1.0 that needs it, each a version ahead."""
    repository = ToyRepository.create(tmp_path / "toy")
    repository.released("tw-a", "0.1.0")
    repository.released("tw-a", "0.1.1")
    repository.released("tw-b", "0.1.0", NEEDS)
    work = repository.root / "packages" / "tw-b" / "tests"
    work.mkdir()
    (work / "test_b.py").write_text("def test_b(): pass\n")
    repository.package("tw-a", "0.1.2")
    repository.package("tw-b", "0.1.1", NEEDS)
    repository.commit()
    build_now(repository, "tw-a", "tw-b")
    return repository


@pytest.fixture
def into(tmp_path):
    folder = tmp_path / "into"
    folder.mkdir()
    return folder


OLDEST = "tw-b 0.1.1 (the checkout) is tested with tw-a 0.1.0 (commit"
NEWEST = "is tested with tw-a 0.1.2.dev1 (the checkout)"
# What happens -> session, package, what the checkout raised, wheels, what is said.
PLANS = {
    "oldest": (compat, "tw-b", (), ["tw_a-0.1.0", "tw_b-0.1.1"], OLDEST),
    "no sibling": (compat, "tw-a", (), [], "tw-a: needs no sibling."),
    "none in bounds": (
        *(compat, "tw-b", ("tw-b", "0.1.1", ["tw-a>=0.1.2"]), []),
        "tw-b: no earlier release of a sibling is in its bounds.",
    ),
    "last dependent": (
        *(forward, "tw-a", ("tw-a", "0.1.2.dev1")),
        *(["tw_a-0.1.2.dev1", "tw_b-0.1.0"], NEWEST),
    ),
    "excluded": (
        *(forward, "tw-a", ("tw-a", "0.2.0"), []),
        "no set of releases goes with it and tw-a 0.2.0; nothing to prove.",
    ),
    "no dependent": (forward, "tw-b", (), [], "tw-b: no released package needs it."),
}


@pytest.mark.parametrize("what", PLANS)
def test_a_session_runs_what_it_says_or_says_why_it_has_nothing_to_prove(
    toy, into, what, capsys
):
    plan, package, raised, wheels, said = PLANS[what]
    if raised:
        toy.package(*raised)
        build_now(toy, raised[0])
    runs = plan(toy.root, package, into)
    assert [stems(run) for run in runs] == [wheels] * bool(wheels)
    assert said in capsys.readouterr().out
    for tree in (Path(run["root"]) for run in runs):
        # Of a release its own tests count: tw-b had none.
        assert (tree / "packages" / "tw-b" / "tests").exists() == (plan is compat)


@pytest.mark.parametrize(
    ("need", "said"),
    [
        ("tw-a>=0.3", r"only tw-a<=0\.1\.2 is available.*tw-a>=0\.3"),
        ("tw-lost", r"tw-lost\s+was\s+not\s+found\s+in\s+the\s+provided"),
    ],
)
def test_what_nothing_meets_is_told_and_no_index_asked(toy, into, need, said):
    toy.package("tw-b", "0.1.1", [need])
    build_now(toy, "tw-b")
    with pytest.raises(ValueError, match=f"(?s){said}"):
        compat(toy.root, "tw-b", into)


def test_forward_prefers_released_siblings_to_those_of_the_checkout(toy, into):
    needs = ["tw-a>=0.1", "tw-b>=0.1"]
    toy.released("tw-c", "0.1.0", needs)
    toy.package("tw-c", "0.1.1", needs)
    build_now(toy, "tw-c")
    _, run = forward(toy.root, "tw-a", into)
    assert stems(run) == ["tw_a-0.1.2", "tw_b-0.1.0", "tw_c-0.1.0"]
    toy.package("tw-a", "0.2.0")  # which the released tw-b excludes
    toy.package("tw-b", "0.2.0", ["tw-a>=0.2"])
    build_now(toy, "tw-a", "tw-b")
    shutil.rmtree(into)
    [run] = forward(toy.root, "tw-a", into)
    assert stems(run) == ["tw_a-0.2.0", "tw_b-0.2.0", "tw_c-0.1.0"]


def test_a_shallow_clone_is_not_enough(toy, into, monkeypatch, capsys):
    clone = into.parent / "clone"
    toy.git("clone", "--quiet", "--depth", "1", toy.root.as_uri(), clone)
    monkeypatch.chdir(clone)
    assert main(["forward", "tw-a", str(into)]) == 1
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


@pytest.mark.parametrize("what", CHANGES)
def test_the_sessions_see_a_change_of_a_face_that_the_bounds_do_not_tell(
    tmp_path, what
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
    assert (
        said.endswith(f"must be {due} or higher; got {version}.") if due else not said
    )
    planned = {"compat": [], "forward": []}
    for plan, package in (
        (compat, "tw-deep"),
        (compat, "tw-flat"),
        (forward, "tw-core"),
    ):
        into = tmp_path / f"{plan.__name__}-{package}"
        into.mkdir()
        planned[plan.__name__] += plan(toy.root, package, into)
    released(toy.root, tmp_path / "tree")
    page = tmp_path / "tree" / "packages" / "tw-core" / "README.md"
    [command] = pieces.commands(page, tmp_path)
    now = light(command, (toy.root / DIST).glob("tw_core-*.whl"))
    assert {name: lights(runs) for name, runs in planned.items()} | {
        "released": now
    } == seen
