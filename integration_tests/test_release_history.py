"""Releases are found by their tags, and without tags in history."""

import pytest
from interfaces.manifest import find_releases
from interfaces.repository import Repository
from interfaces.toy_repository import ToyRepository


@pytest.fixture
def toy(tmp_path):
    return ToyRepository.create(tmp_path / "toy")


def commits(repository):
    return [one.commit for one in find_releases(repository, "tw-a")]


def test_a_release_is_the_first_commit_whose_changelog_dates_it(toy):
    toy.package("tw-a", "0.1.0")
    toy.commit("Add")
    assert commits(toy) == []
    first = toy.released("tw-a", "0.1.0")
    changelog = toy.package("tw-a", "0.1.1", {"tw-b": ">=0.1"}) / "CHANGELOG.md"
    text = changelog.read_text()
    changelog.write_text(text.replace("## 0.1.0", "## 0.1.1 (unreleased)\n\n## 0.1.0"))
    toy.commit("Raise the version early")
    changelog.write_text(text)
    second = toy.released("tw-a", "0.1.1", {"tw-b": ">=0.1"})
    toy.released("tw-b", "0.3.0")
    older = toy.released("tw-a", "0.0.9")  # a fix of what came before
    toy.git("checkout", "--quiet", "-b", "side")
    merged = toy.released("tw-a", "0.2.0")
    toy.git("checkout", "--quiet", "main")
    toy.commit("Elsewhere")
    toy.git("merge", "--quiet", "--no-ff", "-m", "Merge", "side")
    assert commits(toy) == [older, first, second, merged]
    assert [list(one.needs) for one in find_releases(toy, "tw-a")] == [
        *([], [], ["tw-b"], [])
    ]


def test_a_tag_counts_for_more_than_history_and_will_do_without_it(toy, tmp_path):
    toy.released("tw-a", "0.1.0")
    tagged = toy.commit("The tag is here")
    toy.git("tag", "--annotate", "-m", "0.1.0", "tw-a-v0.1.0", tagged)
    toy.commit("Work on")
    assert commits(toy) == [tagged]
    folder = tmp_path / "clone"
    toy.git("clone", "--quiet", "--depth", "1", toy.root.as_uri(), folder)
    clone = Repository(folder)
    with pytest.raises(RuntimeError, match="this clone is shallow"):
        commits(clone)
    tags = ("refs/tags/*:refs/tags/*", "--depth", "1")
    clone.git("fetch", "--quiet", "origin", *tags)
    assert commits(clone) == [tagged]
