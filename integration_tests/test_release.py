"""A release is made whole, or refused and the repository left as it was."""

import tarfile
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest
from interfaces import release as module
from interfaces.manifest import find_releases
from interfaces.release import (
    ARCHIVES,
    check_archives,
    check_same_bytes,
    plan,
    release,
    run_sessions,
    target_version,
)
from interfaces.repository import build
from interfaces.toy_repository import WORK, ToyRepository
from packaging.version import Version

SETTINGS = Path(__file__).parents[1] / "pyproject.toml"
EPOCH = 1_700_000_000


@pytest.fixture
def toy(tmp_path):
    """Has tw-a and tw-b, which needs it, both to be released for the first time."""
    repository = ToyRepository.create(tmp_path / "toy", SETTINGS.read_text())
    (repository.root / ".gitignore").write_text("out/\n")
    for name, needs in (("tw-a", {}), ("tw-b", {"tw-a": ">=0.1,<0.2"})):
        repository.package(name, "0.1.0", needs)
        repository.freeze(name)
        repository.fragment(name, f"What {name} does.")
    repository.commit("Add")
    return repository


def state(repository):
    """Returns all that a failed release must leave alone."""
    return (
        repository.git("rev-parse", "HEAD"),
        repository.git("symbolic-ref", "HEAD"),
        repository.git("tag"),
        repository.git("status", "--porcelain"),
        sorted(path for path in repository.root.rglob("*") if ".git" not in path.parts),
    )


@contextmanager
def refused(repository, said):
    before = state(repository)
    with pytest.raises((RuntimeError, ValueError), match=said):
        yield
    assert state(repository) == before


def passed(targets):
    """Stands for the sessions of the checkout."""


def tags(targets):
    return [target.tag for target in targets]


@pytest.mark.parametrize(
    ("last", "standing", "part", "version"),
    [
        (None, "0.1.0", "first", "0.1.0"),
        ("0.1.0", "0.1.0", "patch", "0.1.1"),
        ("0.1.3", "0.1.3", "minor", "0.2.0"),
        ("0.1.3", "0.2.0", "minor", "0.2.0"),
        ("0.9.0", "0.9.0", "major", "1.0.0"),
    ],
)
def test_the_part_says_which_version_follows(last, standing, part, version):
    last = last and Version(last)
    assert target_version(last, Version(standing), part) == Version(version)


@pytest.mark.parametrize(
    ("last", "standing", "part", "said"),
    [
        (None, "0.1.0", "minor", "there is no release yet; use first for 0.1.0"),
        ("0.1.0", "0.1.0", "first", "0.1.0 is released; use one of patch"),
        ("0.1.0", "0.2.0", "patch", "patch makes 0.1.1 of 0.1.0, but pyproject.toml"),
        ("0.2.0", "0.1.0", "patch", "but pyproject.toml already says 0.1.0"),
        ("0.1.0", "0.1.0", "small", "got the part 'small'; wanted one of patch, minor"),
    ],
)
def test_a_part_that_does_not_suit_is_refused(last, standing, part, said):
    last = last and Version(last)
    with pytest.raises(ValueError, match=said):
        target_version(last, Version(standing), part)


def leave_changes(toy):
    (toy.root / "new.txt").write_text("x")
    (toy.root / "pyproject.toml").write_text("# x")


def take_fragment_away(toy):
    folder = toy.root / "packages" / "tw-a" / "changelog.d"
    (folder / "+toy.added.md").rename(folder / "README.md")
    toy.commit("Take it away")


def rename_argument(toy):
    toy.write_work("tw-a", WORK.replace("size", "count"))
    toy.commit("Rename")


def tag_it(toy):
    toy.git("tag", "tw-a-v0.1.0")


@pytest.mark.parametrize(
    ("spoil", "words", "said"),
    [
        (leave_changes, "all first", r"got 2 changes:(?s:.)*\? new\.txt"),
        (print, "tw-a tw-x first", r"of which \['tw-x'\] are unknown; .* tw-b, or all"),
        (print, "all minor", r"tw-a: there is no release yet.*\ntw-b: there is no"),
        (tag_it, "tw-a first", r"the tag tw-a-v0\.1\.0 exists"),
        (take_fragment_away, "tw-a first", r"tw-a/changelog\.d holds nothing"),
        (rename_argument, "tw-a first", r"the code \(\+\) differ"),
    ],
)
def test_what_can_be_seen_at_once_is_refused_at_once(toy, spoil, words, said):
    spoil(toy)
    *packages, part = words.split()
    with pytest.raises(ValueError, match=said):
        plan(toy, packages, part)


def test_a_patch_that_breaks_its_users_is_refused_with_the_part_that_will_do(toy):
    toy.released("tw-a", "0.1.0")
    rename_argument(toy)
    toy.freeze("tw-a")
    toy.commit("Freeze")
    said = r"must be 0\.2\.0 \(part minor\) or higher; got 0\.1\.1\."
    with pytest.raises(ValueError, match=said):
        plan(toy, ["tw-a"], "patch")
    assert tags(plan(toy, ["tw-a"], "minor")) == ["tw-a-v0.2.0"]


def test_releases_are_committed_tagged_and_found_again(toy, monkeypatch):
    monkeypatch.setenv("UV_PYTHON", "3.99")  # not the one that makes the release
    checked = []
    release(toy.root, ["tw-b", "tw-a"], "first", checked.extend)
    assert tags(checked) == toy.git("tag").split() == ["tw-a-v0.1.0", "tw-b-v0.1.0"]
    assert toy.git("status", "--porcelain") == ""
    assert toy.git("symbolic-ref", "--short", "HEAD") == "main"
    for one in find_releases(toy, "tw-a", "tw-b"):
        assert one.commit == toy.git("rev-parse", f"{one.tag}^{{commit}}")
    assert len(list((toy.root / ARCHIVES).iterdir())) == 4

    toy.write_work("tw-a", WORK + "\n\ndef _new() -> None: ...\n")
    toy.fragment("tw-a", "What is new.")
    toy.commit("Work on")
    release(toy.root, ["tw-a"], "patch", passed)
    assert tags(find_releases(toy, "tw-a")) == ["tw-a-v0.1.0", "tw-a-v0.1.1"]
    folder = toy.root / "packages" / "tw-a"
    text = (folder / "pyproject.toml").read_text()
    assert tomllib.loads(text)["project"]["version"] == "0.1.1"
    changelog = (folder / "CHANGELOG.md").read_text()
    first = changelog.index("- What tw-a does.")
    assert changelog.index("- What is new.") < changelog.index("## 0.1.0 (20") < first


@pytest.fixture
def lightly(monkeypatch):
    """Leaves out what takes long: archives and their installation."""
    monkeypatch.setattr(module, "prepare_archives", lambda *_: [])
    monkeypatch.setattr(module, "install", lambda *_: None)


@pytest.mark.usefixtures("lightly")
@pytest.mark.parametrize(
    ("step", "time"),
    [("commit", 2), ("prepare_archives", 2), ("install", 2), ("bring_back", 1)],
)
def test_a_failure_in_any_step_leaves_the_repository_as_it_was(
    toy, monkeypatch, step, time
):
    whole = getattr(module, step)
    calls = []

    def fail_late(*arguments):
        calls.append(step)
        if len(calls) == time:
            raise RuntimeError("the disk is on fire")
        return whole(*arguments)

    monkeypatch.setattr(module, step, fail_late)
    with refused(toy, "on fire"):
        release(toy.root, ["all"], "first", passed)


@pytest.mark.usefixtures("lightly")
def test_a_session_that_fails_keeps_a_release_from_being_made(toy, tmp_path):
    nox = tmp_path / "python"
    nox.write_text('#!/bin/sh\n[ "$*" = "-m nox -s compat(tw-a) integration" ]\n')
    nox.chmod(0o755)

    def check(targets):
        run_sessions(str(nox), targets)
        run_sessions(str(nox), [*targets, *targets])

    with refused(toy, r"compat\(tw-a\) and integration must pass"):
        release(toy.root, ["tw-a"], "first", check)


@pytest.mark.usefixtures("lightly")
@pytest.mark.parametrize("what", ["commit", "file", "tag"])
def test_what_changed_meanwhile_is_not_released(toy, what):
    def meddle(targets):
        if what == "tag":
            toy.git("tag", "tw-b-v0.1.0")
        else:
            (toy.root / "pyproject.toml").write_text("# x")
        if what == "commit":
            toy.commit("Meanwhile")
        meddled.append(state(toy))

    meddled = []
    with pytest.raises(RuntimeError, match="changed while the release was checked"):
        release(toy.root, ["all"], "first", meddle)
    assert [state(toy)] == meddled


def test_a_tool_that_calls_git_does_not_reach_the_hook_that_runs(
    toy, tmp_path, monkeypatch
):
    outer = ToyRepository.create(tmp_path / "outer")
    [target] = plan(toy, ["tw-a"], "first")
    before = outer.git("ls-files", "--stage")
    monkeypatch.setenv("GIT_DIR", str(outer.root / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(outer.root / ".git" / "index"))
    clone = module.make_clone(toy, tmp_path / "clone")
    module.commit(clone, target)
    fragments = "packages/tw-a/changelog.d"
    assert clone.git("ls-tree", "--name-only", "-r", "HEAD", fragments) == ""
    assert outer.git("ls-files", "--stage") == before


def test_a_package_that_does_not_load_is_not_released(toy):
    toy.write_work("tw-a", "from tw_a import play\n\n" + WORK)
    toy.commit("Use what is not there")
    with refused(toy, "tw_a does not load from its wheel"):
        release(toy.root, ["all"], "first", passed)


def test_a_package_whose_sibling_is_not_released_is_refused_alone(toy):
    with refused(toy, "tw-b admits no set of released siblings"):
        release(toy.root, ["tw-b"], "first", passed)
    toy.released("tw-a", "0.1.0")
    assert tags(release(toy.root, ["tw-b"], "first", passed)) == ["tw-b-v0.1.0"]


def test_two_builds_are_the_same_and_one_at_another_time_is_not(toy, tmp_path):
    source = toy.root / "packages" / "tw-a"
    for name, epoch in (("1", EPOCH), ("2", EPOCH), ("3", EPOCH + 86_400)):
        build(source, tmp_path / name, epoch=str(epoch))
    check_same_bytes(tmp_path / "1", tmp_path / "2")
    with pytest.raises(RuntimeError, match=r"M\s.*tw_a-0\.1\.0-py3-none-any\.whl"):
        check_same_bytes(tmp_path / "1", tmp_path / "3")
    sdist, _ = check_archives(tmp_path / "1", source / "pyproject.toml")
    with tarfile.open(sdist) as archive:
        assert {member.mtime for member in archive} == {EPOCH}
    sdist.unlink()
    with pytest.raises(RuntimeError, match=r"A\s.*tw_a-0\.1\.0\.tar\.gz"):
        check_same_bytes(tmp_path / "1", tmp_path / "2")


def test_a_description_that_an_index_would_not_show_is_refused(toy, tmp_path):
    pyproject = toy.root / "packages" / "tw-a" / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('readme = "README.md"\n', ""))
    build(pyproject.parent, tmp_path / "1")
    with pytest.raises(RuntimeError, match="twine check --strict"):
        check_archives(tmp_path / "1", pyproject)
