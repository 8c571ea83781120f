"""Packs hold the same numbers as their tensors, whatever the plan."""

from math import prod

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tw_core.internal import (
    PackPlan,
    cut_flat,
    join_flat,
    pack_tensors,
    plan_packing,
    unpack_tensors,
)
from tw_core.testing import run_eagerly, run_in_function, run_in_graph

SHAPES = [(), (3,), (2, 4), (0,), (1, 1, 5), (0, 3)]
shapes = st.lists(st.sampled_from(SHAPES), max_size=6)
keys = st.lists(st.sampled_from([None, "a", "b", ("server", "a")]), max_size=8)
each_mode = pytest.mark.parametrize("run", [run_eagerly, run_in_function, run_in_graph])


def arrays(shapes, dtype=np.float32):
    counted = np.cumsum([0, *map(prod, shapes)])
    return [
        np.arange(first, first + prod(shape), dtype=dtype).reshape(shape)
        for first, shape in zip(counted, shapes, strict=False)
    ]


@given(keys)
def test_a_plan_has_every_position_once(keys):
    plan = plan_packing(keys)
    assert sorted(n for group in plan.groups for n in group) == list(range(len(keys)))
    assert set(plan.groups) == {*plan.packs, *((n,) for n in plan.alone)}
    assert list(plan.groups) == sorted(plan.groups)


@given(keys)
def test_a_pack_is_all_tensors_of_a_key_and_more_than_one(keys):
    plan = plan_packing(keys)
    for own in plan.packs:
        [key] = {keys[n] for n in own}
        assert own == tuple(n for n, other in enumerate(keys) if other == key)
        assert len(own) > 1
    assert all(keys[n] is None or keys.count(keys[n]) == 1 for n in plan.alone)
    assert list(plan.packs) == sorted(plan.packs)
    assert list(plan.alone) == sorted(plan.alone)


@given(shapes)
def test_the_planned_shapes_are_those_of_the_packs(shapes):
    plan = plan_packing([None if prod(s) > 4 else "small" for s in shapes])
    packed = pack_tensors([tf.constant(a) for a in arrays(shapes)], plan)
    assert plan.packed_shapes(shapes) == tuple(tuple(p.shape) for p in packed)


@each_mode
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int64])
@pytest.mark.parametrize("shapes", [[()], [(3,)], [(2, 4)], SHAPES, SHAPES[::-1]])
def test_joined_tensors_are_numpys_concatenation_and_come_back(run, dtype, shapes):
    tensors = arrays(shapes, dtype)
    flat, parts = run(
        lambda *t: (join_flat(t), cut_flat(join_flat(t), shapes)), *tensors
    )
    want = np.concatenate([tensor.ravel() for tensor in tensors])
    np.testing.assert_array_equal(flat, want)
    assert flat.dtype == dtype
    for part, tensor in zip(parts, tensors, strict=True):
        np.testing.assert_array_equal(part, tensor)
        assert part.shape == tensor.shape


@each_mode
@pytest.mark.parametrize("small", [0, 1, 5, 100])
def test_packing_and_unpacking_give_the_same_tensors(run, small):
    plan = plan_packing(["small" if prod(shape) < small else None for shape in SHAPES])
    tensors = arrays(SHAPES)
    got = run(lambda *t: unpack_tensors(pack_tensors(t, plan), plan, SHAPES), *tensors)
    for g, tensor in zip(got, tensors, strict=True):
        np.testing.assert_array_equal(g, tensor)


def test_sparse_gradients_stay_alone_as_they_are():
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]))
    plan = PackPlan(packs=((0, 2),), alone=(1,))
    packed = pack_tensors([tf.ones([2]), rows, tf.ones([])], plan)
    assert packed[1] is rows
    assert unpack_tensors(packed, plan, [(2,), None, ()])[1] is rows


def test_shapes_that_only_the_run_knows_are_joined_and_cut():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        fed = [tf.compat.v1.placeholder(tf.float32, s) for s in (None, [None], [2, 2])]
        parts = cut_flat(join_flat(fed), [(2,), (1,), (2, 2)])
        assert [part.shape for part in parts] == [(2,), (1,), (2, 2)]
        values = [[1.0, 2.0], [3.0], [[4.0, 5.0], [6.0, 7.0]]]
        got = session.run(parts, dict(zip(fed, values, strict=True)))
    for g, value in zip(got, values, strict=True):
        np.testing.assert_array_equal(g, value)


@pytest.mark.parametrize("shapes", [[(2,)], [(2,), (3, 1)]])
def test_a_flat_tensor_of_another_length_fails_the_step(shapes):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        flat = tf.compat.v1.placeholder(tf.float32, [None])
        parts = cut_flat(flat, shapes)
        with pytest.raises(tf.errors.InvalidArgumentError):
            session.run(parts, {flat: np.ones(9)})


def test_a_vector_is_joined_and_cut_without_a_reshape(graph):
    cut_flat(join_flat([tf.ones([2]), tf.ones([3])]), [(2,), (3,)])
    assert not [op for op in graph.get_operations() if op.type == "Reshape"]
    flat = tf.ones([4])
    assert flat is join_flat([flat])


def test_packs_are_made_on_the_device_in_scope(graph):
    with tf.device("/cpu:1"):
        tensors = [tf.ones([2]), tf.ones([1, 3])]
    with tf.device("/cpu:2"):
        flat = join_flat(tensors)
    with tf.device("/cpu:3"):
        parts = cut_flat(flat, [(2,), (1, 3)])
    assert flat.device == "/device:CPU:2"
    assert {part.device for part in parts} == {"/device:CPU:3"}
