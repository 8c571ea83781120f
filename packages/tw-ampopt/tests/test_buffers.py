"""Plans against what they promise.

Imports private modules: which gradients share a buffer is no part of the results, and
only what a step costs depends on it.
"""

import math
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from tw_ampopt._update import buffers
from tw_ampopt._update.buffers import plan_buffers

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=12)


@given(SHAPES, st.integers(0, 30))
def test_every_gradient_stands_in_the_plan_once(shapes, limit):
    with mock.patch.object(buffers, "JOIN_UP_TO", limit):
        plan = plan_buffers(shapes)
    packed = [n for pack in plan.packs for n in pack]
    assert sorted([*packed, *plan.alone]) == list(range(len(shapes)))
    assert all(math.prod(shapes[n]) <= limit for n in packed)
    assert len(plan.packs) <= 1
    assert len(packed) != 1
    elements = sum(map(math.prod, plan.packed_shapes(shapes)))
    assert elements == sum(map(math.prod, shapes))


def test_sparse_gradients_and_those_above_16384_elements_stay_alone():
    shapes = [(16_384,), (16_385,), (3,), (4,)]
    plan = plan_buffers(shapes, sparse=[False, False, False, True])
    assert (plan.packs, plan.alone) == (((0, 2),), (1, 3))
    assert plan.packed_shapes(shapes) == ((16_387,), (16_385,), (4,))
