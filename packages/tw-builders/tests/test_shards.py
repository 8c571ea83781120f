"""Shards of variables over towers of ranks, in plain Python."""

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tw_builders._over_ranks.plan import plan_shards

SHAPES = st.lists(st.lists(st.integers(1, 40), max_size=3), min_size=1, max_size=9)


def loads_of(plan, shapes, sizes, ranks, towers):
    loads = [[0] * towers for _ in range(ranks)]
    for shard in plan:
        own = prod(shard.shape(shapes[shard.variable])) * sizes[shard.variable]
        loads[shard.rank][shard.tower] += own
    return loads


@given(data=st.data(), shapes=SHAPES, ranks=st.integers(1, 4), towers=st.integers(1, 3))
def test_every_row_has_one_owner_and_loads_are_even(data, shapes, ranks, towers):
    count = len(shapes)
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    cuts, sizes = data.draw(flags), [4] * count
    plan = plan_shards(shapes, sizes, cuts, num_ranks=ranks, num_towers=towers)
    assert plan == tuple(sorted(plan))
    whole = [shard.variable for shard in plan if shard.rows is None]
    assert len(set(whole)) == len(whole)
    for n in set(range(count)) - set(whole):
        rows = [shard.rows for shard in plan if shard.variable == n]
        assert cuts[n] and len(rows) > 1
        assert rows[0][0] == 0 and rows[-1][1] == shapes[n][0]
        assert all(one[1] == other[0] for one, other in pairwise(rows))
        assert all(first < last for first, last in rows)
    bytes_of = [prod(shape) * 4 for shape in shapes]
    row = max(
        [size // shapes[n][0] for n, size in enumerate(bytes_of) if shapes[n]] or [0]
    )
    largest = max([bytes_of[n] for n in whole] or [0])
    loads = [own for of in loads_of(plan, shapes, sizes, ranks, towers) for own in of]
    assert max(loads) <= sum(bytes_of) / len(loads) + max(largest, row)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_has_its_share_of_a_model_within_two_percent(ranks):
    layer = [[512, 2_048], [2_048], [2_048, 512], [512], [512], [512]]
    shapes = [[30_000, 512], *(layer * 6), [512, 30_000]]
    plan = plan_shards(shapes, [4] * 38, [True] * 38, num_ranks=ranks, num_towers=2)
    loads = [sum(own) for own in loads_of(plan, shapes, [4] * 38, ranks, 2)]
    assert max(loads) <= (1 / ranks + 0.02) * sum(loads)
