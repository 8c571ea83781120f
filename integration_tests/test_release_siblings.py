"""Tests with siblings of other releases are planned from history, by uv's resolver."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
from interfaces.__main__ import main
from interfaces.manifest import Manifest, find_releases, needed_by
from interfaces.repository import build
from interfaces.siblings import DIST, build_wheels, compat, forward
from interfaces.toy_repository import ToyRepository
from packaging.version import Version

# No index has what is not ours: it is left out.
NEEDS = {"tw-a": ">=0.1,<0.2", "no-such-thing": ">=1"}


def stems(run):
    return sorted(Path(path).name.split("-py3")[0] for path in run["wheels"])


def build_now(toy, *names):
    for name in names:
        build(toy.root / "packages" / name, toy.root / DIST, "--wheel")


def test_what_a_package_needs_through_others_in_any_state_is_needed():
    top = Manifest("tw-top", Version("0.1"), frozenset())
    states = [
        top,
        Manifest("tw-top", Version("0.2"), frozenset({"tw-reduce"})),
        Manifest("tw-reduce", Version("0.1"), frozenset({"tw-core"})),
    ]
    assert needed_by("tw-top", states) == {"tw-core", "tw-reduce"}
    assert needed_by("tw-core", states) == needed_by("tw-top", [top]) == set()


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
    repository.commit("Work on")
    build_now(repository, "tw-a", "tw-b")
    return repository


@pytest.fixture
def into(tmp_path):
    folder = tmp_path / "into"
    folder.mkdir()
    return folder


OLDEST = "tw-b 0.1.1 (the checkout) is tested with tw-a 0.1.0 (commit"
# What happens -> session, package, what the checkout raised, wheels, what is said.
PLANS = {
    "oldest": (compat, "tw-b", {}, ["tw_a-0.1.0", "tw_b-0.1.1"], OLDEST),
    "no sibling": (compat, "tw-a", {}, [], "tw-a: needs no sibling."),
    "none in bounds": (
        *(compat, "tw-b", {"tw-b": ("0.1.1", {"tw-a": ">=0.1.2"})}, []),
        "tw-b: no earlier release of a sibling is in its bounds.",
    ),
    "last dependent": (
        *(forward, "tw-a", {}, ["tw_a-0.1.2", "tw_b-0.1.0"]),
        "is tested with tw-a 0.1.2 (the checkout)",
    ),
    "prerelease": (
        *(forward, "tw-a", {"tw-a": ("0.1.2.dev1", {})}),
        ["tw_a-0.1.2.dev1", "tw_b-0.1.0"],
        "is tested with tw-a 0.1.2.dev1 (the checkout)",
    ),
    "excluded": (
        *(forward, "tw-a", {"tw-a": ("0.2.0", {})}, []),
        "no set of releases goes with it and tw-a 0.2.0; nothing to prove.",
    ),
    "no dependent": (forward, "tw-b", {}, [], "tw-b: no released package needs it."),
}


@pytest.mark.parametrize("what", PLANS)
def test_a_session_runs_what_it_says_or_says_why_it_has_nothing_to_prove(
    toy, into, what, capsys
):
    plan, package, raised, wheels, said = PLANS[what]
    for name, state in raised.items():
        toy.package(name, *state)
        build_now(toy, name)
    runs = plan(toy.root, package, into)
    assert [stems(run) for run in runs] == [wheels] * bool(wheels)
    assert said in capsys.readouterr().out
    for tree in (Path(run["root"]) for run in runs):
        # Of a release its own tests count: tw-b had none.
        assert (tree / "packages" / "tw-b" / "tests").exists() == (plan is compat)


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ({"tw-a": ">=0.3"}, r"only tw-a<=0\.1\.2 is available.*tw-a>=0\.3"),
        ({"tw-lost": ">=0"}, r"tw-lost\s+was\s+not\s+found\s+in\s+the\s+provided"),
    ],
    ids=["outside the bounds", "not ours"],
)
def test_what_nothing_meets_is_told_and_no_index_asked(toy, into, needs, said):
    toy.package("tw-b", "0.1.1", needs)
    build_now(toy, "tw-b")
    with pytest.raises(ValueError, match=f"(?s){said}"):
        compat(toy.root, "tw-b", into)


def test_forward_prefers_released_siblings_to_those_of_the_checkout(toy, into):
    needs = {"tw-a": ">=0.1", "tw-b": ">=0.1"}
    toy.released("tw-c", "0.1.0", needs)
    toy.package("tw-c", "0.1.1", needs)
    build_now(toy, "tw-c")
    _, run = forward(toy.root, "tw-a", into)
    assert stems(run) == ["tw_a-0.1.2", "tw_b-0.1.0", "tw_c-0.1.0"]
    toy.package("tw-a", "0.2.0")  # which the released tw-b excludes
    toy.package("tw-b", "0.2.0", {"tw-a": ">=0.2"})
    build_now(toy, "tw-a", "tw-b")
    shutil.rmtree(into)
    [run] = forward(toy.root, "tw-a", into)
    assert stems(run) == ["tw_a-0.2.0", "tw_b-0.2.0", "tw_c-0.1.0"]


def test_the_wheel_of_a_release_holds_what_its_commit_held(toy, tmp_path):
    work = toy.root / "packages" / "tw-a" / "src" / "tw_a" / "_work.py"
    then = work.read_text()
    work.write_text("broken now")
    [wheel] = build_wheels(toy.root, find_releases(toy, "tw-a")[:1], tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("tw_a/_work.py").decode() == then


def test_a_wheel_of_the_checkout_that_is_missing_is_named(toy, into):
    next((toy.root / DIST).glob("tw_b-*")).unlink()
    with pytest.raises(RuntimeError, match=r"one wheel of tw-b 0\.1\.1 \(the checkout"):
        compat(toy.root, "tw-b", into)


@pytest.mark.parametrize(
    ("session", "package"), [("compat", "tw-b"), ("forward", "tw-a")]
)
@pytest.mark.parametrize("depth", [(), ("--depth", "1")], ids=["whole", "shallow"])
def test_a_clone_without_tags_is_enough_and_a_shallow_one_is_not(
    toy, into, session, package, depth, monkeypatch, capsys
):
    clone = into.parent / "clone"
    toy.git("clone", "--quiet", "--no-tags", *depth, toy.root.as_uri(), clone)
    shutil.copytree(toy.root / DIST, clone / DIST)
    monkeypatch.chdir(clone)
    assert main([session, package, str(into)]) == bool(depth)
    assert bool(depth) == ("git fetch --unshallow" in capsys.readouterr().err)
    runs = json.loads((into / "runs.json").read_text()) if not depth else []
    assert [run["package"] for run in runs] == ["tw-b"] * (not depth)
