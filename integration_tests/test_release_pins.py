"""The search for releases that go together agrees with trying every combination."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interfaces.compat import describe, oldest
from interfaces.forward import last_dependents, newest_with
from interfaces.manifest import Manifest
from interfaces.pins import Candidate, admits, pick
from interfaces.released import Release
from packaging.specifiers import SpecifierSet
from packaging.version import Version

NAMES = ["tw-a", "tw-b", "tw-c"]


def manifest(name, version, **needs):
    bounds = {f"tw-{other}": SpecifierSet(bound) for other, bound in needs.items()}
    return Manifest(name, Version(version), bounds)


def release(name, version, **needs):
    return Release(manifest(name, version, **needs), f"{name}-{version}-commit")


@st.composite
def bounds(draw):
    low, high = sorted(draw(st.tuples(st.integers(1, 4), st.integers(1, 4))))
    return SpecifierSet(f">=0.{low},<0.{high + 1}")


@st.composite
def histories(draw):
    """Versions 0.1, 0.2, ... of tw-a to tw-c, a later name needing earlier ones."""
    history = {}
    for i, name in enumerate(NAMES):
        history[name] = [
            Candidate(
                Manifest(
                    name,
                    Version(f"0.{minor}"),
                    {other: draw(bounds()) for other in draw(subsets(NAMES[:i]))},
                )
            )
            for minor in range(1, draw(st.integers(2, 4)) + 1)
        ]
    return history


def subsets(names):
    return st.lists(st.sampled_from(names), unique=True) if names else st.just([])


def goes_together(combination):
    return all(
        admits(bound, other.manifest.version)
        for one in combination
        for need, bound in one.manifest.needs.items()
        for other in combination
        if other.manifest.name == need
    )


def every_set(top, history):
    """Lists all sets that hold what ``top`` and they themselves need, no more."""
    for kept in itertools.product(*([None, *history[name]] for name in NAMES)):
        chosen = [top, *(one for one in kept if one)]
        have = {one.manifest.name for one in chosen}
        needed = {need for one in chosen for need in one.manifest.needs}
        if have - {"tw-top"} == needed and goes_together(chosen):
            yield {one.manifest.name: one for one in chosen}


@settings(max_examples=300)
@given(history=histories(), data=st.data())
def test_the_search_finds_a_set_when_there_is_one_and_the_first_of_all(history, data):
    wanted = data.draw(st.permutations(NAMES))[: data.draw(st.integers(1, 3))]
    needs = {name: data.draw(bounds()) for name in wanted}
    top = Candidate(Manifest("tw-top", Version("1"), needs))
    found = pick([top], history)
    sets = list(every_set(top, history))
    assert (found is None) == (not sets)
    if found is None:
        return
    assert found in sets

    def direct(chosen):
        return [history[name].index(chosen[name]) for name in wanted]

    assert direct(found) == min(map(direct, sets))


def test_an_old_sibling_that_refuses_another_gives_way_to_a_newer_one():
    manifests = {
        "tw-core": manifest("tw-core", "0.3.0"),
        "tw-reduce": manifest("tw-reduce", "0.2.0", core=">=0.2"),
        "tw-top": manifest("tw-top", "0.1.0", core=">=0.2", reduce=">=0.1"),
    }
    releases = {
        "tw-core": [release("tw-core", v) for v in ("0.1.0", "0.2.0", "0.3.0")],
        "tw-reduce": [
            release("tw-reduce", "0.1.0", core="<0.2"),
            release("tw-reduce", "0.1.1", core="<0.3"),
        ],
    }
    found = [str(one) for one in oldest("tw-top", manifests, releases)]
    assert found == [
        "tw-core 0.2.0 (commit tw-core-0)",
        "tw-reduce 0.1.1 (commit tw-reduce)",
    ]


def test_a_choice_that_leaves_nothing_for_another_sibling_is_taken_back():
    history = {
        "tw-a": [Candidate(manifest("tw-a", v)) for v in ("0.1.0", "0.2.0")],
        "tw-b": [Candidate(manifest("tw-b", "0.1.0", a=">=0.2"))],
    }
    top = Candidate(manifest("tw-top", "0.1.0", a=">=0.1", b=">=0.1"))
    assert [str(one.manifest.version) for one in pick([top], history).values()] == [
        "0.1.0",
        "0.2.0",
        "0.1.0",
    ]
    del history["tw-a"][1]
    assert pick([top], history) is None


def test_a_sibling_without_fitting_release_comes_from_the_checkout():
    manifests = {
        "tw-core": manifest("tw-core", "0.2.0"),
        "tw-top": manifest("tw-top", "0.1.0", core=">=0.2"),
    }
    found = oldest("tw-top", manifests, {"tw-core": [release("tw-core", "0.1.0")]})
    assert [str(one) for one in found] == ["tw-core 0.2.0 (the checkout)"]
    assert "no earlier release of a sibling" in describe("tw-top", found)


def test_bounds_that_nothing_meets_are_told_with_all_that_there_was():
    manifests = {
        "tw-core": manifest("tw-core", "0.2.0"),
        "tw-top": manifest("tw-top", "0.1.0", core=">=0.3"),
    }
    with pytest.raises(ValueError) as error:
        oldest("tw-top", manifests, {"tw-core": [release("tw-core", "0.1.0")]})
    said = str(error.value)
    assert "tw-core 0.1.0 (commit tw-core-0) does not fit >=0.3" in said
    assert "tw-core 0.2.0 (the checkout) does not fit >=0.3" in said


def test_a_package_without_siblings_has_nothing_to_prove():
    manifests = {"tw-core": manifest("tw-core", "0.2.0")}
    assert "needs no sibling" in describe("tw-core", oldest("tw-core", manifests, {}))


def test_the_last_releases_that_reach_a_package_are_its_dependents():
    releases = {
        "tw-core": [release("tw-core", "0.1.0")],
        "tw-reduce": [release("tw-reduce", "0.1.0", core=">=0.1")],
        "tw-top": [
            release("tw-top", "0.1.0", core=">=0.1"),
            release("tw-top", "0.2.0", reduce=">=0.1"),
        ],
        "tw-other": [release("tw-other", "0.1.0")],
        "tw-new": [],
    }
    found = [str(one) for one in last_dependents("tw-core", releases)]
    assert found == [
        "tw-reduce 0.1.0 (commit tw-reduce)",
        "tw-top 0.2.0 (commit tw-top-0.)",
    ]


def test_a_dependent_is_tested_with_the_newest_siblings_that_go_with_it():
    dependent = release("tw-top", "0.1.0", core=">=0.1", reduce=">=0.1")
    releases = {
        "tw-core": [release("tw-core", "0.1.0")],
        "tw-reduce": [
            release("tw-reduce", "0.1.0", core=">=0.1"),
            release("tw-reduce", "0.2.0", core=">=0.1"),
            release("tw-reduce", "0.3.0", core=">=0.3"),
        ],
    }
    manifests = {
        "tw-core": manifest("tw-core", "0.2.0"),
        "tw-reduce": manifest("tw-reduce", "0.3.0", core=">=0.2"),
    }
    found = newest_with("tw-core", dependent, manifests, releases)
    assert [str(one) for one in found] == [
        "tw-core 0.2.0 (the checkout)",
        "tw-top 0.1.0 (commit tw-top-0.)",
        "tw-reduce 0.2.0 (commit tw-reduce)",
    ]


def test_a_sibling_of_a_dependent_comes_from_the_checkout_where_no_release_fits():
    dependent = release("tw-top", "0.1.0", core=">=0.1", reduce=">=0.1")
    manifests = {
        "tw-core": manifest("tw-core", "0.2.0"),
        "tw-reduce": manifest("tw-reduce", "0.2.0", core=">=0.2"),
    }
    releases = {"tw-reduce": [release("tw-reduce", "0.1.0", core="<0.2")]}
    found = newest_with("tw-core", dependent, manifests, releases)
    assert [str(one) for one in found] == [
        "tw-core 0.2.0 (the checkout)",
        "tw-top 0.1.0 (commit tw-top-0.)",
        "tw-reduce 0.2.0 (the checkout)",
    ]


def test_a_dependent_whose_bounds_exclude_the_package_is_told_of():
    dependent = release("tw-top", "0.1.0", core="<0.2")
    manifests = {"tw-core": manifest("tw-core", "0.2.0")}
    assert newest_with("tw-core", dependent, manifests, {}) is None
