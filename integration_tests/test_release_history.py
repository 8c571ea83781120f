"""Releases are found by their tags, and without tags in history."""

import pytest
from interfaces.manifest import find_releases
from interfaces.repository import Repository
from interfaces.toy_repository import ToyRepository


@pytest.fixture
def toy(tmp_path):
    return ToyRepository.create(tmp_path / "toy")


def test_a_release_is_the_first_commit_whose_changelog_dates_it(toy):
    toy.package("tw-a", "0.1.0")
    toy.commit("Add")
    assert find_releases(toy, "tw-a") == []
    first = toy.released("tw-a", "0.1.0")
    toy.package("tw-a", "0.1.0", {"tw-b": ">=0.1"})
    toy.commit("Work on")
    changelog = toy.package("tw-a", "0.1.1", {"tw-b": ">=0.1"}) / "CHANGELOG.md"
    text = changelog.read_text()
    changelog.write_text(text.replace("## 0.1.0", "## 0.1.1 (unreleased)\n\n## 0.1.0"))
    toy.commit("Raise the version early")
    changelog.write_text(text)
    second = toy.released("tw-a", "0.1.1", {"tw-b": ">=0.1"})
    toy.released("tw-b", "0.3.0")
    older = toy.released("tw-a", "0.0.9")  # a fix of what came before
    found = find_releases(toy, "tw-a")
    assert [(str(one.version), one.commit) for one in found] == [
        ("0.0.9", older),
        ("0.1.0", first),
        ("0.1.1", second),
    ]
    assert [list(one.needs) for one in found] == [[], [], ["tw-b"]]


def test_a_tag_counts_for_more_than_history(toy):
    toy.released("tw-a", "0.1.0")
    tagged = toy.commit("The tag is here")
    toy.git("tag", "--annotate", "-m", "0.1.0", "tw-a-v0.1.0", tagged)
    untagged = toy.released("tw-a", "0.1.1")
    toy.commit("Work on")
    assert [one.commit for one in find_releases(toy, "tw-a")] == [tagged, untagged]


def test_a_shallow_clone_will_do_where_it_has_the_tags_and_is_refused_without(
    toy, tmp_path
):
    released = toy.released("tw-a", "0.1.0")
    toy.git("tag", "tw-a-v0.1.0")
    toy.commit("Later")
    folder = tmp_path / "clone"
    toy.git("clone", "--quiet", "--depth", "1", toy.root.as_uri(), folder)
    clone = Repository(folder)
    with pytest.raises(RuntimeError, match="this clone is shallow"):
        find_releases(clone, "tw-a")
    tags = ("refs/tags/*:refs/tags/*", "--depth", "1")
    clone.git("fetch", "--quiet", "origin", *tags)
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
