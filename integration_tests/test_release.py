"""A release is made whole, or refused and the repository left as it was."""

import tarfile
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest
from interfaces import release as module
from interfaces.citation import FILE
from interfaces.manifest import find_releases
from interfaces.release import (
    ARCHIVES,
    build_tagged,
    check_archives,
    check_same_bytes,
    check_tag,
    plan,
    release,
    run_sessions,
)
from interfaces.repository import Repository, build
from interfaces.toy_repository import WORK, ToyRepository

SETTINGS = Path(__file__).parents[1] / "pyproject.toml"
TAG = "tw-a-v0.1.0"
EPOCH = 1_700_000_000


@pytest.fixture
def toy(tmp_path):
    """Has tw-a and tw-b, which needs it, both to be released for the first time."""
    repository = ToyRepository.create(tmp_path / "toy", SETTINGS.read_text())
    (repository.root / FILE).write_text("cff-version: 1.2.0\nlicense: Apache-2.0\n")
    (repository.root / ".gitignore").write_text("out/\n")
    for name, needs in (("tw-a", {}), ("tw-b", {"tw-a": ">=0.1,<0.2"})):
        repository.package(name, "0.1.0", needs)
        repository.freeze(name)
        repository.fragment(name, f"What {name} does.")
    repository.commit("Add")
    return repository


@pytest.fixture
def tagged(tmp_path):
    """Has a release of tw-a, tagged."""
    repository = ToyRepository.create(tmp_path / "toy")
    (repository.root / ".gitignore").write_text("out/\n")
    repository.released("tw-a", "0.1.0")
    repository.git("tag", TAG)
    return repository


@pytest.fixture
def lightly(monkeypatch):
    """Leaves out what takes long: archives and their installation."""
    monkeypatch.setattr(module, "build_twice", lambda *_: None)
    monkeypatch.setattr(module, "built_wheels", lambda *_: {})
    monkeypatch.setattr(module, "install", lambda *_: None)


def state(repository):
    """Returns all that a failed release must leave alone."""
    told = (("rev-parse", "HEAD"), ("symbolic-ref", "HEAD"), ("tag",), ("status", "-s"))
    files = [path for path in repository.root.rglob("*") if ".git" not in path.parts]
    return [repository.git(*words) for words in told], sorted(files)


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


def rename_argument(toy):
    toy.write_work("tw-a", WORK.replace("size", "count"))
    toy.commit("Rename")


def raise_version(toy, version="0.2.0"):
    toy.package("tw-a", version)
    toy.commit(f"Raise the version to {version}")


def leave_changes(toy):
    (toy.root / "new.txt").write_text("x")
    (toy.root / "pyproject.toml").write_text("# x")


def leave_fragment(toy):
    toy.fragment("tw-a", "What the changelog lacks.")


def take_fragment_away(toy):
    folder = toy.root / "packages" / "tw-a" / "changelog.d"
    (folder / "+toy.added.md").rename(folder / "README.md")
    toy.commit("Take it away")


def forget_section(toy):
    (toy.root / "packages" / "tw-a" / "CHANGELOG.md").write_text("# Changelog\n")


def tag_it(toy):
    toy.git("tag", TAG)


def work_on(toy):
    toy.commit("Work on")


@pytest.mark.parametrize(
    ("spoil", "words", "said"),
    [
        (leave_changes, "all", r"got 2 changes:(?s:.)*\? new\.txt"),
        (print, "tw-a tw-x", r"of which \['tw-x'\] are unknown; .* tw-b, or all"),
        (tag_it, "tw-a", r"tw-a: the tag tw-a-v0\.1\.0 exists"),
        (take_fragment_away, "tw-a", r"tw-a/changelog\.d holds nothing"),
        (rename_argument, "tw-a", r"the code \(\+\) differ"),
    ],
)
def test_what_can_be_seen_at_once_is_refused_at_once(toy, spoil, words, said):
    spoil(toy)
    with pytest.raises(ValueError, match=said):
        plan(toy, words.split())


def test_the_faults_of_all_packages_are_told(toy):
    tag_it(toy)
    toy.git("tag", "tw-b-v0.1.0")
    with pytest.raises(ValueError, match=r"tw-a: the tag .*\ntw-b: the tag "):
        plan(toy, ["all"])


def test_a_released_version_is_followed_by_its_patch_and_a_raised_one_stands(toy):
    toy.released("tw-a", "0.1.3")
    assert tags(plan(toy, ["tw-a"])) == ["tw-a-v0.1.4"]
    raise_version(toy, "0.2.0")
    assert tags(plan(toy, ["all"])) == ["tw-a-v0.2.0", "tw-b-v0.1.0"]
    raise_version(toy, "0.1.2")
    with pytest.raises(ValueError, match=r"must be 0\.1\.3 or higher; got 0\.1\.2"):
        plan(toy, ["tw-a"])


def test_a_patch_that_breaks_its_users_is_refused_with_the_version_that_will_do(toy):
    toy.released("tw-a", "0.1.0")
    rename_argument(toy)
    toy.freeze("tw-a")
    toy.commit("Freeze")
    with pytest.raises(ValueError, match=r"must be 0\.2\.0 or higher; got 0\.1\.1\."):
        plan(toy, ["tw-a"])
    raise_version(toy)
    assert tags(plan(toy, ["tw-a"])) == ["tw-a-v0.2.0"]


def test_releases_are_committed_tagged_and_found_again(toy, monkeypatch):
    monkeypatch.setenv("UV_PYTHON", "3.99")  # not the one that makes the release
    checked = []
    release(toy.root, ["tw-b", "tw-a"], checked.extend)
    assert tags(checked) == toy.git("tag").split() == ["tw-a-v0.1.0", "tw-b-v0.1.0"]
    assert toy.git("status", "--porcelain") == ""
    assert toy.git("symbolic-ref", "--short", "HEAD") == "main"
    today = toy.git("log", "-1", "--format=%cs")
    cited = f'version: "0.1.0"\ndate-released: "{today}"\nlicense: Apache-2.0\n'
    assert (toy.root / FILE).read_text() == f"cff-version: 1.2.0\n{cited}"
    for one in find_releases(toy, "tw-a", "tw-b"):
        assert one.commit == toy.git("rev-parse", f"{one.tag}^{{commit}}")
    assert len(list((toy.root / ARCHIVES).glob("tw-?/*"))) == 4

    toy.write_work("tw-a", WORK + "\n\ndef _new() -> None: ...\n")
    toy.fragment("tw-a", "What is new.")
    toy.commit("Work on")
    release(toy.root, ["tw-a"], passed)
    assert tags(find_releases(toy, "tw-a")) == ["tw-a-v0.1.0", "tw-a-v0.1.1"]
    folder = toy.root / "packages" / "tw-a"
    text = (folder / "pyproject.toml").read_text()
    assert tomllib.loads(text)["project"]["version"] == "0.1.1"
    changelog = (folder / "CHANGELOG.md").read_text()
    first = changelog.index("- What tw-a does.")
    assert changelog.index("- What is new.") < changelog.index("## 0.1.0 (20") < first


@pytest.mark.usefixtures("lightly")
@pytest.mark.parametrize(
    ("step", "time"),
    [("commit", 2), ("build_twice", 2), ("install", 2), ("bring_back", 1)],
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
    with refused(toy, "on fire\nNothing was released"):
        module.run(toy.root, ["all"], "true")


@pytest.mark.usefixtures("lightly")
def test_a_session_that_fails_keeps_a_release_from_being_made(toy, tmp_path):
    nox = tmp_path / "python"
    nox.write_text('#!/bin/sh\n[ "$*" = "-m nox -s compat(tw-a) integration" ]\n')
    nox.chmod(0o755)

    def check(targets):
        run_sessions(str(nox), targets)
        run_sessions(str(nox), [*targets, *targets])

    with refused(toy, r"compat\(tw-a\) and integration must pass"):
        release(toy.root, ["tw-a"], check)


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
        release(toy.root, ["all"], meddle)
    assert [state(toy)] == meddled


def test_a_tool_that_calls_git_does_not_reach_the_hook_that_runs(
    toy, tmp_path, monkeypatch
):
    outer = ToyRepository.create(tmp_path / "outer")
    [target] = plan(toy, ["tw-a"])
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
        release(toy.root, ["all"], passed)


def test_a_package_whose_sibling_is_not_released_is_refused_alone(toy):
    with refused(toy, "tw-b admits no set of released siblings"):
        release(toy.root, ["tw-b"], passed)
    toy.released("tw-a", "0.1.0")
    assert tags(release(toy.root, ["tw-b"], passed)) == ["tw-b-v0.1.0"]


def test_two_builds_are_the_same_and_one_at_another_time_is_not(toy, tmp_path):
    source = toy.root / "packages" / "tw-a"
    for name, epoch in (("1", EPOCH), ("2", EPOCH), ("3", EPOCH + 86_400)):
        build(source, tmp_path / name, epoch=str(epoch))
    check_same_bytes(tmp_path / "1", tmp_path / "2")
    with pytest.raises(RuntimeError, match=r"M\s.*tw_a-0\.1\.0-py3-none-any\.whl"):
        check_same_bytes(tmp_path / "1", tmp_path / "3")
    sdist = tmp_path / "1" / "tw_a-0.1.0.tar.gz"
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


def test_what_is_published_is_built_from_the_tagged_commit_alone(tagged, tmp_path):
    old = tagged.root / ARCHIVES / "tw-a" / "old.whl"
    old.parent.mkdir(parents=True)
    old.write_text("of a run before")
    folder = build_tagged(tagged.root, TAG)
    exported = Repository(tagged.root).export(TAG, tmp_path / "again")
    epoch = tagged.git("log", "-1", "--format=%ct", TAG)
    build(exported / "packages" / "tw-a", tmp_path / "built", epoch=epoch)
    assert len(list(folder.iterdir())) == 2
    check_same_bytes(folder, tmp_path / "built")


@pytest.mark.parametrize(
    ("spoil", "tag", "said"),
    [
        (print, "v0.1.0", r"got the tag 'v0\.1\.0'; wanted one such as tw-a-v0\.1\.0"),
        (print, "tw-x-v0.1.0", r"got the tag 'tw-x-v0\.1\.0'"),
        (print, "tw-a-v0.1.1", r"pyproject\.toml says 0\.1\.0\.(?s:.)*no such tag"),
        (work_on, TAG, r"it names [0-9a-f]{9}; checked out is [0-9a-f]{9}\."),
        (raise_version, TAG, r"pyproject\.toml says 0\.2\.0\.(?s:.)*only for 0\.1\.0"),
        (forget_section, TAG, r"no dated section for 0\.1\.0, only for none"),
        (leave_fragment, TAG, r"changelog\.d holds \['\+toy\.added\.md'\]"),
        (rename_argument, TAG, r"api\.txt \(-\) and the code \(\+\) differ"),
    ],
)
def test_a_tag_that_does_not_agree_with_the_files_is_refused(tagged, spoil, tag, said):
    spoil(tagged)
    with pytest.raises(ValueError, match=said):
        check_tag(tagged, tag)
