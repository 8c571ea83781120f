"""Plans against what they promise; buffers against their gradients."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tw_ampopt._update.buffer_plan import plan_buffers
from tw_ampopt._update.buffers import divided, pack, scaled, unpack
from tw_core.testing import SparseRows, run_in_function, run_in_graph

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=12)


@given(SHAPES, st.integers(0, 30))
def test_every_gradient_stands_in_the_plan_once(shapes, limit):
    plan = plan_buffers(shapes, pack_up_to=limit)
    assert sorted([*plan.packed, *plan.alone]) == list(range(len(shapes)))
    assert all(math.prod(shapes[n]) <= limit for n in plan.packed)
    assert len(plan.packed) != 1
    elements = sum(math.prod(shape) for shape in plan.buffer_shapes)
    assert elements == sum(math.prod(shape) for shape in shapes)


def test_sparse_gradients_stay_alone():
    plan = plan_buffers([(2,), (3,), (4,)], sparse=[False, True, False])
    assert (plan.packed, plan.alone) == ((0, 2), (1,))


def test_the_packed_buffer_holds_16384_elements_a_gradient_at_most():
    plan = plan_buffers([(16_384,), (16_385,), (3,)])
    assert (plan.packed, plan.alone) == ((0, 2), (1,))
    assert plan.buffer_shapes == ((16_387,), (16_385,))


@pytest.mark.parametrize("run", [run_in_graph, run_in_function])
def test_unpacking_gives_what_was_packed(run):
    shapes = [(2, 3), (), (5,), (0, 2), (4, 5)]
    grads = [np.random.default_rng(0).random(shape, np.float32) for shape in shapes]
    plan = plan_buffers(shapes, pack_up_to=6)
    assert plan.alone == (4,)
    for got, want in zip(
        run(lambda g: unpack(plan, pack(plan, g)), grads), grads, strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("run", [run_in_graph, run_in_function])
def test_a_small_sparse_gradient_is_packed_dense(run):
    rows = SparseRows(np.ones((2, 2), np.float32), np.array([1, 1]), np.array([3, 2]))
    plan = plan_buffers([(3, 2), (2,)])
    (flat,) = run(lambda s, d: pack(plan, [s, d]), rows, np.array([5, 6], np.float32))
    np.testing.assert_array_equal(flat, [0, 0, 2, 2, 0, 0, 5, 6])


@pytest.mark.parametrize("run", [run_in_graph, run_in_function])
def test_factors_reach_dense_and_sparse_buffers(run):
    rows = SparseRows(np.ones((1, 2), np.float32), np.array([0]), np.array([3, 2]))
    dense, two = np.ones(3, np.float32), np.float32(2)
    got = run(
        lambda d, s, f: [scaled(d, f), scaled(s, f), divided(d, f), divided(s, f)],
        *(dense, rows, two),
    )
    assert [np.unique(getattr(g, "values", g)).item() for g in got] == [2, 2, 0.5, 0.5]
    assert (
        run(lambda d: [scaled(d, None), divided(d, None)], dense)[0].tolist() == [1] * 3
    )
