"""A release that must not be made is refused before anything is changed."""

import pytest
from interfaces.release_plan import ReleasePlan, plan
from interfaces.release_targets import Target, target_version
from interfaces.toy_repository import WORK, ToyRepository
from packaging.version import Version


@pytest.fixture
def toy(tmp_path):
    """Has tw-a and tw-b, which needs it, both to be released for the first time."""
    repository = ToyRepository.create(tmp_path / "toy")
    for name, needs in (("tw-a", {}), ("tw-b", {"tw-a": ">=0.1,<0.2"})):
        repository.package(name, "0.1.0", needs)
        repository.freeze(name)
        repository.fragment(name)
    repository.commit("Add")
    return repository


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


def test_all_packages_are_planned_in_the_order_of_their_needs(toy):
    made = plan(toy.root, ["all"], "first")
    assert [target.tag for target in made.targets] == ["tw-a-v0.1.0", "tw-b-v0.1.0"]
    assert made.head == toy.git("rev-parse", "HEAD")
    assert plan(toy.root, ["tw-b", "tw-a"], "first").targets == made.targets


def test_a_plan_survives_its_file(toy):
    made = ReleasePlan("abc", 1_700_000_000, (Target("tw-a", Version("0.1.0")),))
    assert ReleasePlan.from_json(made.to_json()) == made


def test_a_tree_with_changes_is_refused_and_they_are_named(toy):
    (toy.root / "new.txt").write_text("x")
    (toy.root / "pyproject.toml").write_text("# x")
    with pytest.raises(ValueError, match="must be clean; got 2 changes") as error:
        plan(toy.root, ["tw-a"], "first")
    assert "new.txt" in str(error.value)
    assert "pyproject.toml" in str(error.value)


def test_an_unknown_package_is_refused_with_the_known_ones(toy):
    said = r"of which \['tw-x'\] are unknown; wanted one or more of tw-a, tw-b, or all"
    with pytest.raises(ValueError, match=said):
        plan(toy.root, ["tw-a", "tw-x"], "first")


def test_every_package_that_a_part_does_not_suit_is_named(toy):
    with pytest.raises(ValueError) as error:
        plan(toy.root, ["all"], "minor")
    assert "tw-a: there is no release yet" in str(error.value)
    assert "tw-b: there is no release yet" in str(error.value)


def test_a_tag_that_exists_is_refused(toy):
    toy.git("tag", "tw-a-v0.1.0")
    with pytest.raises(ValueError, match=r"the tag tw-a-v0\.1\.0 exists"):
        plan(toy.root, ["tw-a"], "first")


def test_a_changelog_that_would_say_nothing_is_refused(toy):
    folder = toy.root / "packages" / "tw-a" / "changelog.d"
    (folder / "+toy.added.md").rename(folder / "README.md")
    toy.commit("Take it away")
    with pytest.raises(ValueError, match=r"tw-a/changelog\.d holds nothing"):
        plan(toy.root, ["tw-a"], "first")


def test_a_package_whose_sibling_is_not_released_is_refused_alone(toy):
    said = "its bounds admit no set of released siblings: tw-a<0.2,>=0.1"
    with pytest.raises(ValueError, match=said):
        plan(toy.root, ["tw-b"], "first")
    toy.released("tw-a", "0.1.0")
    assert [target.tag for target in plan(toy.root, ["tw-b"], "first").targets] == [
        "tw-b-v0.1.0"
    ]


def test_an_interface_that_the_file_does_not_show_is_refused(toy):
    work = toy.root / "packages" / "tw-a" / "src" / "tw_a" / "_work.py"
    work.write_text(WORK.replace("size", "count"))
    toy.commit("Rename")
    with pytest.raises(ValueError, match=r"the code \(\+\) differ"):
        plan(toy.root, ["tw-a"], "first")


@pytest.mark.parametrize(
    ("last", "wrong", "due", "part"),
    [("0.1.0", "0.1.1", "0.2.0", "minor"), ("1.0.0", "1.0.1", "2.0.0", "major")],
)
def test_a_patch_that_breaks_its_users_is_refused_with_the_part_that_will_do(
    toy, last, wrong, due, part
):
    toy.released("tw-a", last)
    work = toy.root / "packages" / "tw-a" / "src" / "tw_a" / "_work.py"
    work.write_text(WORK.replace("size", "count"))
    toy.freeze("tw-a")
    toy.commit("Rename")
    with pytest.raises(ValueError) as error:
        plan(toy.root, ["tw-a"], "patch")
    assert f"must be {due} or higher; got {wrong}." in str(error.value)
    assert str(error.value).endswith(f"Use the part {part}.")
    [target] = plan(toy.root, ["tw-a"], part).targets
    assert target.tag == f"tw-a-v{due}"
