"""Any options of ``TowerModel`` train as one device, or are refused by name.

``structure.pairs`` declares what each pair does, and the docs show it.
"""

from functools import cache
from random import Random

import numpy as np
import pytest
from programs import rank_pairs
from structure import pairs

SAME = 1e-11
TOWERS = {"tower": 1, "towers": 3, "rank": 2, "ranks": 2}  # of each process
RANKS = {"rank": 1, "ranks": 2}
NOT_KERAS = {"memory", "own reducer", "parameter server"}
# How many choices of three options are drawn that train, and that are refused.
DRAWN = {"towers": (21, 3), "ranks": (10, 2)}


@cache
def on_one_device(names):
    return rank_pairs.trained(None, names, 0)


def outcome(groups, over, names):
    """Returns "=" for one device's numbers, what differs, or how it is refused."""
    if over in RANKS:
        results = groups(RANKS[over]).call("rank_pairs:trained", names, TOWERS[over])
    else:
        results = [rank_pairs.trained(None, names, TOWERS[over])]
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
    if pairs.are_rounded(over, names):
        return "=" if SAME < worst < pairs.ROUNDS else f"differs by {worst:.2g}"
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


def check(groups, over, names):
    got, refusals = outcome(groups, over, names), pairs.refusals(names)
    if refusals:
        assert got.startswith(tuple(refusals))
    elif pairs.have_other_numbers(names):
        assert got.startswith("differs")
    else:
        assert got == "="


def cases(choices):
    return [
        pytest.param(over, names, id=f"{over}-{'+'.join(names)}")
        for over, names in choices
    ]


def drawn(over):
    """Draws three options at a time, always the same."""
    triples, random = pairs.given(over, 3), Random(over)
    trained, refused = DRAWN[over]
    of_refused = [own for own in triples if pairs.refusals(own)]
    return [
        *random.sample([own for own in triples if not pairs.refusals(own)], trained),
        *random.sample(of_refused, min(refused, len(of_refused))),
    ]


PAIRS = [
    (over, names)
    for over in pairs.OVER
    for count in (1, 2)
    for names in pairs.given(over, count)
]
# A lone tower, where its step is not Keras's own anyway, and a group of one rank.
PAIRS += [
    ("tower", names)
    for over, names in PAIRS
    if over == "towers" and NOT_KERAS.intersection(names)
]
PAIRS += [("rank", names) for names in pairs.given("ranks", 1)]
TRIPLES = [(over, names) for over in pairs.OVER for names in drawn(over)]


@pytest.mark.slow(
    by_day=["towers-accumulation+clipping", "ranks-clipping+shards", "ranks-wire"]
)
@pytest.mark.parametrize(("over", "names"), cases(PAIRS))
def test_options_train_as_one_device_or_are_refused(groups, over, names):
    check(groups, over, names)


@pytest.mark.slow
@pytest.mark.parametrize(("over", "names"), cases(TRIPLES))
def test_three_options_do_what_their_pairs_say(groups, over, names):
    check(groups, over, names)


def test_the_page_has_the_table_of_pairs():
    assert list(rank_pairs.OPTIONS) == list(pairs.OPTIONS)
    declared = {own.options for own in [*pairs.REFUSED, *pairs.OTHER_NUMBERS]}
    assert declared <= {*pairs.given("ranks", 2)}
    page = pairs.PAGE.read_text()
    assert page == pairs.written(page), "python -m structure.pairs writes it"
