"""Any two options of ``TowerModel`` train as one device, or are refused by name."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from programs import rank_pairs

SAME = 1e-11
PAIRS = [p for p in combinations(rank_pairs.OPTIONS, 2) if not rank_pairs.are_apart(p)]
ALL = [(name,) for name in rank_pairs.OPTIONS] + PAIRS
OVER = {  # Ranks alone can take steps alone.
    "towers": [names for names in ALL if "local steps" not in names],
    "ranks": ALL,
}
REDUCES = "TowerModel: reducer is not called with variables="
# What is refused, and the beginning of the error.
REFUSED = {
    ("memory", "shards"): REDUCES,
    ("memory", "parameter server"): REDUCES,
    ("shards", "own reducer"): REDUCES,
    ("parameter server", "own reducer"): REDUCES,
    ("memory", "local steps"): "TowerModel: with local_steps ranks send weights",
    ("memory", "eager"): "TowerModel: a reducer with memory keeps state for each",
    ("local steps", "steps per execution"): "TowerModel: local_steps must be a multi",
}
# Each rank clips its own gradients, and skips its own steps.
OWN_NUMBERS = [{"local steps", "clipping"}, {"local steps", "loss scale"}]


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
    for over, of in OVER.items()
    for names in of
]


@pytest.mark.slow(by_day=["towers-accumulation+clipping", "ranks-clipping+shards"])
@pytest.mark.parametrize(("over", "names"), CASES)
def test_options_train_as_one_device_or_are_refused(groups, over, names):
    got = outcome(groups, over, names)
    wanted = REFUSED.get(names, "=")
    if any(own <= set(names) for own in OWN_NUMBERS):
        wanted = "differs"
    assert got == "=" if wanted == "=" else got.startswith(wanted)
