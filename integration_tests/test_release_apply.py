"""A release is made whole, or leaves the repository as it was."""

import tarfile
import tomllib
from pathlib import Path

import pytest
from interfaces import release_apply
from interfaces.artifacts import build_archives, check_archives, check_same_bytes
from interfaces.clean_install import check_clean_install
from interfaces.manifest import with_version
from interfaces.release_apply import ARCHIVES, apply
from interfaces.release_plan import plan
from interfaces.released import find_releases
from interfaces.toy_repository import WORK, ToyRepository
from packaging.version import Version

SETTINGS = Path(__file__).parents[1] / "pyproject.toml"


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
        repository.changes(),
        repository.git("worktree", "list").splitlines()[1:],
        sorted(path for path in repository.root.rglob("*") if ".git" not in path.parts),
    )


def test_releases_are_committed_tagged_and_found_again(toy, tmp_path):
    apply(toy, plan(toy.root, ["all"], "first"), tmp_path / "work")
    assert toy.changes() == []
    assert toy.git("tag").split() == ["tw-a-v0.1.0", "tw-b-v0.1.0"]
    assert toy.git("symbolic-ref", "--short", "HEAD") == "main"
    for name in ("tw-a", "tw-b"):
        [found] = find_releases(toy, name)
        assert found.commit == toy.git("rev-parse", f"{name}-v0.1.0^{{commit}}")
    changelog = (toy.root / "packages" / "tw-a" / "CHANGELOG.md").read_text()
    assert "## 0.1.0 (20" in changelog
    assert "- What tw-a does." in changelog
    assert len(list((toy.root / ARCHIVES).iterdir())) == 4

    repeat = toy.root / "packages" / "tw-a" / "src" / "tw_a" / "_work.py"
    repeat.write_text(WORK + "\n\ndef _new() -> None: ...\n")
    toy.fragment("tw-a", "What is new.")
    toy.commit("Work on")
    apply(toy, plan(toy.root, ["tw-a"], "patch"), tmp_path / "work2")
    assert [str(one.version) for one in find_releases(toy, "tw-a")] == [
        "0.1.0",
        "0.1.1",
    ]
    text = (toy.root / "packages" / "tw-a" / "pyproject.toml").read_text()
    assert tomllib.loads(text)["project"]["version"] == "0.1.1"
    changelog = (toy.root / "packages" / "tw-a" / "CHANGELOG.md").read_text()
    assert changelog.index("What is new.") < changelog.index("What tw-a does.")


@pytest.mark.parametrize(
    "step", ["commit", "prepare_archives", "install", "publish_here"]
)
def test_a_failure_in_any_step_leaves_the_repository_as_it_was(
    toy, tmp_path, monkeypatch, step
):
    whole = getattr(release_apply, step)
    calls = []

    def fail_late(*arguments):
        calls.append(step)
        if len(calls) == (1 if step == "publish_here" else 2):
            raise RuntimeError("the disk is on fire")
        return whole(*arguments)

    made = plan(toy.root, ["all"], "first")
    before = state(toy)
    monkeypatch.setattr(release_apply, step, fail_late)
    with pytest.raises(RuntimeError, match="on fire"):
        apply(toy, made, tmp_path / "work")
    assert state(toy) == before


def test_tags_are_taken_back_when_the_branch_cannot_move(toy, tmp_path):
    made = plan(toy.root, ["tw-a"], "first")
    aside = toy.git("commit-tree", "-m", "Elsewhere", "HEAD^{tree}")
    before = state(toy)
    with pytest.raises(RuntimeError, match="git merge"):
        release_apply.publish_here(toy, made.targets, [aside])
    assert state(toy) == before


def test_a_tool_that_calls_git_does_not_reach_the_hook_that_runs(
    toy, tmp_path, monkeypatch
):
    outer = ToyRepository.create(tmp_path / "outer")
    made = plan(toy.root, ["tw-a"], "first")
    before = outer.git("ls-files", "--stage")
    monkeypatch.setenv("GIT_DIR", str(outer.root / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(outer.root / ".git" / "index"))
    with release_apply.second_tree(toy, made.head, tmp_path / "tree") as tree:
        commit = release_apply.commit(tree, made.targets[0], made.epoch)
        fragments = "packages/tw-a/changelog.d"
        assert toy.git("ls-tree", "--name-only", "-r", commit, fragments) == ""
    assert outer.git("ls-files", "--stage") == before


def test_a_branch_that_moved_meanwhile_is_not_released(toy, tmp_path):
    made = plan(toy.root, ["tw-a"], "first")
    toy.commit("Meanwhile")
    with pytest.raises(ValueError, match="HEAD moved from"):
        apply(toy, made, tmp_path / "work")


def test_a_package_that_does_not_load_is_not_released(toy, tmp_path):
    work = toy.root / "packages" / "tw-b" / "src" / "tw_b" / "_work.py"
    work.write_text("from tw_a import play\n\n" + WORK)
    toy.commit("Use what is not there")
    made = plan(toy.root, ["all"], "first")
    before = state(toy)
    with pytest.raises(RuntimeError, match="tw_b does not load from its wheel"):
        apply(toy, made, tmp_path / "work")
    assert state(toy) == before


def test_a_wheel_is_installed_for_the_interpreter_that_makes_the_release(
    toy, tmp_path, monkeypatch
):
    source = toy.root / "packages" / "tw-a"
    archives = build_archives(source, tmp_path / "1", epoch=1_700_000_000)
    wheels = [path for path in archives if path.suffix == ".whl"]
    monkeypatch.setenv("UV_PYTHON", "3.99")
    check_clean_install("tw_a", wheels)


def test_two_builds_are_the_same_and_one_at_another_time_is_not(toy, tmp_path):
    source = toy.root / "packages" / "tw-a"
    epoch = 1_700_000_000
    first = build_archives(source, tmp_path / "1", epoch=epoch)
    build_archives(source, tmp_path / "2", epoch=epoch)
    build_archives(source, tmp_path / "3", epoch=epoch + 86_400)
    check_same_bytes(tmp_path / "1", tmp_path / "2")
    with pytest.raises(RuntimeError, match=r"tw_a-0\.1\.0-py3-none-any\.whl"):
        check_same_bytes(tmp_path / "1", tmp_path / "3")
    check_archives(first, source / "pyproject.toml")
    [sdist] = [path for path in first if path.suffix == ".gz"]
    with tarfile.open(sdist) as archive:
        assert {member.mtime for member in archive} == {epoch}


def test_a_description_that_an_index_would_not_show_is_refused(toy, tmp_path):
    source = toy.root / "packages" / "tw-a"
    text = (source / "pyproject.toml").read_text()
    (source / "pyproject.toml").write_text(text.replace('readme = "README.md"\n', ""))
    archives = build_archives(source, tmp_path / "1", epoch=1_700_000_000)
    with pytest.raises(RuntimeError, match="twine check --strict"):
        check_archives(archives, source / "pyproject.toml")


def test_a_version_that_stands_on_no_line_of_its_own_is_refused():
    with pytest.raises(ValueError, match="on one line; got 0 such lines"):
        with_version("version='0.1.0'\n", Version("0.2.0"))
