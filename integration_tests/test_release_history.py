"""Releases are found in history by version and changelog, without tags."""

import pytest
from interfaces.released import find_releases, released_manifest
from interfaces.repository import Repository
from interfaces.toy_repository import ToyRepository

PYPROJECT = '[project]\nname = "tw-a"\nversion = "0.2.0"\n'


@pytest.fixture
def toy(tmp_path):
    return ToyRepository.create(tmp_path / "toy")


@pytest.mark.parametrize(
    ("changelog", "is_release"),
    [
        ("# Log\n\n## 0.2.0 (2025-01-01)\n\n## 0.1.0 (2024-01-01)\n", True),
        ("# Log\n\n## 0.2.0 (unreleased)\n", False),
        ("# Log\n\n## 0.1.0 (2025-01-01)\n", False),
        ("# Log\n\n## 0.3.0 (unreleased)\n\n## 0.2.0 (2025-01-01)\n", False),
        ("# Log\n", False),
        ("", False),
    ],
)
def test_a_state_releases_the_version_whose_section_is_newest_and_dated(
    changelog, is_release
):
    manifest = released_manifest(PYPROJECT, changelog)
    assert (manifest is not None) == is_release
    assert released_manifest("", changelog) is None


def test_each_version_is_released_by_the_first_commit_that_says_so(toy):
    toy.package("tw-a", "0.1.0")
    toy.commit("Add")
    first = toy.released("tw-a", "0.1.0")
    toy.package("tw-a", "0.1.0", {"tw-b": ">=0.1"})
    toy.commit("Work on")
    toy.package("tw-a", "0.1.1", {"tw-b": ">=0.1"})
    toy.commit("Raise the version early")
    second = toy.released("tw-a", "0.1.1", {"tw-b": ">=0.1"})
    toy.released("tw-b", "0.3.0")
    found = find_releases(toy, "tw-a")
    assert [(str(one.version), one.commit) for one in found] == [
        ("0.1.0", first),
        ("0.1.1", second),
    ]
    assert [list(one.manifest.needs) for one in found] == [[], ["tw-b"]]


def test_a_fix_of_an_older_version_comes_before_the_newer_one(toy):
    toy.released("tw-a", "0.2.0")
    toy.released("tw-a", "0.1.9")
    assert [str(one.version) for one in find_releases(toy, "tw-a")] == [
        "0.1.9",
        "0.2.0",
    ]


def test_a_package_without_release_has_none(toy):
    toy.package("tw-a", "0.1.0")
    toy.commit("Add")
    assert find_releases(toy, "tw-a") == []


def test_releases_are_found_in_a_clone_without_tags(toy, tmp_path):
    released = toy.released("tw-a", "0.1.0")
    toy.git("tag", "tw-a-v0.1.0")
    toy.git("clone", "--quiet", "--no-tags", str(toy.root), str(tmp_path / "clone"))
    clone = Repository(tmp_path / "clone")
    assert clone.git("tag") == ""
    assert [one.commit for one in find_releases(clone, "tw-a")] == [released]


def test_a_merge_does_not_hide_a_release(toy):
    toy.package("tw-a", "0.1.0")
    toy.commit("Add")
    toy.git("checkout", "--quiet", "-b", "side")
    released = toy.released("tw-a", "0.1.0")
    toy.git("checkout", "--quiet", "main")
    (toy.root / "README.md").write_text("x")
    toy.commit("Elsewhere")
    toy.git("merge", "--quiet", "--no-ff", "-m", "Merge", "side")
    assert [one.commit for one in find_releases(toy, "tw-a")] == [released]


def test_a_shallow_clone_is_refused(toy, tmp_path):
    toy.released("tw-a", "0.1.0")
    toy.commit("Later")
    folder = str(tmp_path / "clone")
    toy.git("clone", "--quiet", "--depth", "1", toy.root.as_uri(), folder)
    with pytest.raises(RuntimeError, match="this clone is shallow"):
        find_releases(Repository(tmp_path / "clone"), "tw-a")


def test_a_folder_without_repository_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(RuntimeError, match="not a git repository"):
        find_releases(Repository(tmp_path), "tw-a")


def test_git_is_asked_about_the_folder_and_not_about_the_hook_that_runs(
    tmp_path, monkeypatch
):
    outer = ToyRepository.create(tmp_path / "outer")
    before = outer.commit("Outer")
    monkeypatch.setenv("GIT_DIR", str(outer.root / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(outer.root))
    monkeypatch.setenv("GIT_INDEX_FILE", str(outer.root / ".git" / "index"))
    inner = ToyRepository.create(tmp_path / "inner")
    released = inner.released("tw-a", "0.1.0")
    assert [one.commit for one in find_releases(inner, "tw-a")] == [released]
    assert outer.git("rev-parse", "HEAD") == before


def test_a_toy_signs_nothing_whatever_its_user_has_set(tmp_path, monkeypatch):
    settings = tmp_path / "gitconfig"
    settings.write_text(
        "[commit]\ngpgSign = true\n[tag]\ngpgSign = true\n[gpg]\nprogram = false\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    toy = ToyRepository.create(tmp_path / "toy")
    toy.git("tag", "--annotate", "-m", "One", "one", toy.commit("Start"))
