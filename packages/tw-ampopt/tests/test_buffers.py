"""Plans against what they promise; buffers against their gradients.

Imports private modules: which gradients share a buffer is no part of the results, and
only what a step costs depends on it.
"""

import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tw_ampopt._update import buffers
from tw_ampopt._update.buffers import make_buffers, plan_buffers
from tw_core.internal import unpack_tensors
from tw_core.testing import SparseRows, run_in_function, run_in_graph

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


def test_sparse_gradients_stay_alone():
    plan = plan_buffers([(2,), (3,), (4,)], sparse=[False, True, False])
    assert (plan.packs, plan.alone) == (((0, 2),), (1,))


def test_the_packed_buffer_holds_16384_elements_per_gradient_at_most():
    shapes = [(16_384,), (16_385,), (3,)]
    plan = plan_buffers(shapes)
    assert (plan.packs, plan.alone) == (((0, 2),), (1,))
    assert plan.packed_shapes(shapes) == ((16_387,), (16_385,))


@pytest.mark.parametrize("run", [run_in_graph, run_in_function])
def test_unpacking_gives_what_was_packed(run):
    shapes = [(2, 3), (), (5,), (0, 2), (129, 130)]
    grads = [np.random.default_rng(0).random(shape, np.float32) for shape in shapes]
    assert plan_buffers(shapes).alone == (4,)

    def packed_and_unpacked(tower):
        raw = [[[grad] for grad in tower]]
        plan, [packed] = make_buffers(raw, shapes, ["/cpu:0"], keep_sparse=True)
        assert len(packed) == 2
        return unpack_tensors(packed, plan, shapes)

    for got, want in zip(run(packed_and_unpacked, grads), grads, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("run", [run_in_graph, run_in_function])
@pytest.mark.parametrize("keep_sparse", [False, True])
def test_a_small_sparse_gradient_is_packed_dense_unless_it_may_stay_sparse(
    run, keep_sparse
):
    rows = SparseRows(np.ones((2, 2), np.float32), np.array([1, 1]), np.array([3, 2]))
    shapes = [(3, 2), (2,), (1,)]

    def pack(*tower):
        raw = [[[grad] for grad in tower]]
        return make_buffers(raw, shapes, ["/cpu:0"], keep_sparse=keep_sparse)[1][0]

    got = run(pack, rows, np.array([5, 6], np.float32), np.ones(1, np.float32))
    if keep_sparse:
        np.testing.assert_array_equal(got[0], [5, 6, 1])
        np.testing.assert_array_equal(got[1].values, np.ones((2, 2)))
    else:
        np.testing.assert_array_equal(got[0], [0, 0, 2, 2, 0, 0, 5, 6, 1])
