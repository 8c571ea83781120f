"""Any options of ``TowerModel`` train as one device, or are refused by name.

``structure.pairs`` declares what each pair does, and the docs show it.
"""

from functools import cache

import numpy as np
import pytest
from programs import rank_pairs
from structure import pairs

SAME = 1e-11


@cache
def on_one_device(names):
    return rank_pairs.trained(None, names, 0)


def outcome(groups, over, names):
    """Returns "=" for one device's numbers, what differs, or how it is refused."""
    if over == "ranks":
        results = groups(2).call("rank_pairs:trained", names, 2)
    else:
        results = [rank_pairs.trained(None, names, 3)]
    refused = [own for own in results if isinstance(own, str)]
    if refused:
        assert refused == results[:1] * len(results), "all ranks refuse, or none"
        return refused[0]
    for own in results:
        assert own["unseen"] == [], "options without a sign that they took effect"
    first, plain = results[0]["weights"][0], on_one_device(names)
    apart = [difference(got, first) for own in results for got in own["weights"]]
    assert max_of(apart) < SAME, "towers and ranks are equal"
    apart = [difference(first, plain["weights"][0])]
    for own in results:
        apart.append(difference(own["optimizer"], plain["optimizer"]))
        if "local steps" not in names:  # whose ranks have other losses within a step
            apart.append(difference(own["history"], plain["history"]))
    worst = max_of(apart)
    return "=" if worst < SAME else f"differs by {worst:.2g}"


def difference(got, want):
    return max_of(
        [
            np.abs(np.subtract(one, other)).max()
            for one, other in zip(got, want, strict=True)
        ]
    )


def max_of(numbers):
    return np.max(numbers)  # NaN if one is, where Python's may pass over it


CASES = [
    pytest.param(over, names, id=f"{over}-{'+'.join(names)}")
    for over in pairs.OVER
    for count in (1, 2)
    for names in pairs.given(over, count)
]


@pytest.mark.slow(by_day=["towers-accumulation+clipping", "ranks-clipping+shards"])
@pytest.mark.parametrize(("over", "names"), CASES)
def test_options_train_as_one_device_or_are_refused(groups, over, names):
    got, refusals = outcome(groups, over, names), pairs.refusals(names)
    if refusals:
        assert got.startswith(tuple(refusals))
    elif pairs.have_other_numbers(names):
        assert got.startswith("differs")
    else:
        assert got == "="


def test_the_page_has_the_table_of_pairs():
    assert list(rank_pairs.OPTIONS) == list(pairs.OPTIONS)
    declared = {own.options for own in [*pairs.REFUSED, *pairs.OTHER_NUMBERS]}
    assert declared <= {*pairs.given("ranks", 2)}
    page = pairs.PAGE.read_text()
    assert page == pairs.written(page), "python -m structure.pairs writes it"
