"""Runs with older releases are planned and built from history alone."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from interfaces import compat, forward
from interfaces.old_wheels import release_wheel
from interfaces.pins import Candidate
from interfaces.quietly import run_quietly
from interfaces.released import find_releases
from interfaces.toy_repository import ToyRepository


@pytest.fixture
def toy(tmp_path):
    """Has tw-a 0.1.0 and 0.1.1, and tw-b 0.1.0 that needs it, each a version ahead."""
    repository = ToyRepository.create(tmp_path / "toy")
    repository.released("tw-a", "0.1.0")
    repository.released("tw-a", "0.1.1")
    repository.released("tw-b", "0.1.0", {"tw-a": ">=0.1,<0.2"})
    work = repository.root / "packages" / "tw-b" / "tests"
    work.mkdir()
    (work / "test_b.py").write_text("def test_b(): pass\n")
    repository.package("tw-a", "0.1.2")
    repository.package("tw-b", "0.1.1", {"tw-a": ">=0.1,<0.2"})
    repository.commit("Work on")
    return repository


@pytest.fixture
def folders(toy, tmp_path):
    """Returns the folders ``dist``, with wheels of the checkout, and ``into``."""
    dist, into = tmp_path / "dist", tmp_path / "into"
    into.mkdir()
    for name in ("tw-a", "tw-b"):
        source = str(toy.root / "packages" / name)
        options = ("--no-isolation", "--wheel", "--outdir", str(dist))
        run_quietly("build", *options, source)
    return {"dist": dist, "into": into}


def names(run):
    return [Path(wheel).name.split("-py3")[0] for wheel in run.wheels]


def test_compat_takes_the_oldest_sibling_and_the_package_of_now(toy, folders, capsys):
    [run] = compat.plan(toy.root, "tw-b", **folders)
    assert names(run) == ["tw_b-0.1.1", "tw_a-0.1.0"]
    assert run.root == str(toy.root)
    assert "tw-b is tested with tw-a 0.1.0 (commit" in capsys.readouterr().out


def test_forward_takes_the_last_dependent_with_its_own_tests(toy, folders, capsys):
    [run] = forward.plan(toy.root, "tw-a", **folders)
    assert names(run) == ["tw_a-0.1.2", "tw_b-0.1.0"]
    tree = Path(run.root)
    assert tree.is_relative_to(folders["into"])
    assert not (tree / "packages" / "tw-b" / "tests").exists()  # as it was released
    assert "is tested with tw-a 0.1.2 (the checkout)" in capsys.readouterr().out


def test_forward_names_a_dependent_that_excludes_the_package(toy, folders, capsys):
    toy.package("tw-a", "0.2.0")
    assert forward.plan(toy.root, "tw-a", **folders) == []
    assert "no set of releases goes with it and tw-a 0.2.0" in capsys.readouterr().out


def test_nothing_is_planned_where_nothing_was_released(tmp_path, capsys):
    new = ToyRepository.create(tmp_path / "new")
    new.package("tw-a", "0.1.0")
    new.package("tw-b", "0.1.0", {"tw-a": ">=0.1"})
    new.commit("Add")
    folders = {"dist": tmp_path, "into": tmp_path}
    assert compat.plan(new.root, "tw-b", **folders) == []
    assert "no earlier release of a sibling" in capsys.readouterr().out
    assert forward.plan(new.root, "tw-a", **folders) == []
    assert "tw-a: no released package needs it." in capsys.readouterr().out


def test_the_wheel_of_a_release_holds_what_its_commit_held(toy, tmp_path):
    work = toy.root / "packages" / "tw-a" / "src" / "tw_a" / "_work.py"
    then = work.read_text()
    work.write_text("broken now")
    release = find_releases(toy, "tw-a")[0]
    wheel = release_wheel(Candidate.released(release), toy, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("tw_a/_work.py").decode() == then


@pytest.mark.parametrize("planner", ["compat", "forward"])
def test_a_clone_without_tags_plans_the_same(toy, folders, planner, tmp_path):
    toy.git("tag", "tw-a-v0.1.0", find_releases(toy, "tw-a")[0].commit)
    clone = tmp_path / "clone"
    toy.git("clone", "--quiet", "--no-tags", str(toy.root), str(clone))
    done = planned(planner, clone, folders)
    assert done.returncode == 0, done.stderr
    [run] = json.loads((folders["into"] / "runs.json").read_text())
    assert run["package"] == "tw-b"


@pytest.mark.parametrize("planner", ["compat", "forward"])
def test_a_shallow_clone_fails_and_says_what_is_missing(
    toy, folders, planner, tmp_path
):
    clone = tmp_path / "clone"
    toy.git("clone", "--quiet", "--depth", "1", toy.root.as_uri(), str(clone))
    done = planned(planner, clone, folders)
    assert done.returncode == 1
    assert "commits of earlier releases are missing" in done.stderr
    assert "git fetch --unshallow" in done.stderr
    assert not (folders["into"] / "runs.json").exists()


def planned(planner, root, folders):
    package = {"compat": "tw-b", "forward": "tw-a"}[planner]
    options = ("--dist", str(folders["dist"]), "--into", str(folders["into"]))
    return subprocess.run(
        [sys.executable, "-m", f"interfaces.{planner}", package, *options],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
