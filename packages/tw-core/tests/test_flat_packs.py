"""Packs hold the same numbers as their tensors, whatever the plan."""

from math import prod

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tw_core._flat_packs import whole_of_parts
from tw_core._tracing.trace import _packs
from tw_core.internal import (
    PackPlan,
    cut_flat,
    join_flat,
    map_flat,
    pack_tensors,
    plan_buckets,
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


@given(
    st.integers(1, 4).flatmap(
        lambda ranks: st.lists(
            st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks), max_size=9
        )
    ),
    st.one_of(st.none(), st.integers(1, 30)),
)
def test_buckets_go_from_the_last_to_the_first_until_they_are_full(sizes, limit):
    def is_full(places):
        if not places or limit is None:
            return False
        of_ranks = np.sum([sizes[n] for n in places], axis=0)
        return of_ranks.sum() >= limit and of_ranks.max() <= 1.25 * of_ranks.mean()

    buckets = plan_buckets(sizes, limit)
    assert [n for own in reversed(buckets) for n in own] == list(range(len(sizes)))
    for n, own in enumerate(buckets):
        # It is full with its first variable, or the last, and was not before.
        assert is_full(own) or n == len(buckets) - 1
        assert not is_full(own[1:])


@given(keys)
def test_a_pack_is_all_tensors_of_a_key_and_more_than_one(keys):
    plan = plan_packing(keys)
    assert sorted(n for group in plan.groups for n in group) == list(range(len(keys)))
    assert set(plan.groups) == {*plan.packs, *((n,) for n in plan.alone)}
    for listed in (plan.groups, plan.packs, plan.alone):
        assert list(listed) == sorted(listed)
    for own in plan.packs:
        [key] = {keys[n] for n in own}
        assert own == tuple(n for n, other in enumerate(keys) if other == key)
        assert len(own) > 1
    assert all(keys[n] is None or keys.count(keys[n]) == 1 for n in plan.alone)


@given(shapes)
def test_the_planned_shapes_are_those_of_the_packs(shapes):
    plan = plan_packing([None if prod(s) > 4 else "small" for s in shapes])
    tensors = arrays(shapes)
    packed = pack_tensors(list(map(tf.constant, tensors)), plan)
    assert plan.packed_shapes(shapes) == tuple(tuple(p.shape) for p in packed)
    for g, tensor in zip(unpack_tensors(packed, plan, shapes), tensors, strict=True):
        np.testing.assert_array_equal(g, tensor)


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


@given(st.permutations(range(7)), st.integers(1, 7))
def test_parts_of_a_flat_tensor_are_joined_as_pieces_of_it(order, count):
    chosen, values = list(order)[:count], arrays([*SHAPES, (2,)])
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        flat = tf.constant(np.concatenate([own.ravel() for own in values[:6]]))
        parts = [*cut_flat(flat, SHAPES), tf.constant(values[6])]
        joined = join_flat([parts[n] for n in chosen])
        want = np.concatenate([values[n].ravel() for n in chosen])
        np.testing.assert_array_equal(session.run(joined), want)
        doubled = session.run(map_flat(lambda t: 2 * t, [parts[n] for n in chosen]))
        assert join_flat(parts[:6]) is flat
        assert join_flat(parts[1:4]).op.type == "Slice"
    for n, own in zip(chosen, doubled, strict=True):
        np.testing.assert_array_equal(own, 2 * values[n])


def test_eager_tensors_are_joined_with_parts_in_a_function():
    flat, eager = np.arange(17, dtype=np.float32), tf.constant([20.0, 21.0])

    @tf.function
    def join(flat):
        return join_flat([eager, *cut_flat(flat, SHAPES), eager])

    np.testing.assert_array_equal(join(flat), [20, 21, *flat, 20, 21])


def test_parts_enter_as_wholes_where_towers_have_all_of_them_alike():
    with tf.Graph().as_default():
        flats = [tf.zeros([9]), tf.ones([9])]
        rows = [cut_flat(flat, [(3,), (2, 2), (), (1,)]) for flat in flats]
        wholes, undo = whole_of_parts([[*own, flats[0]] for own in rows])
        assert [row[0] for row in wholes] == flats
        assert [tuple(own.shape) for own in undo(wholes[0])][:2] == [(3,), (2, 2)]
        unlike = [rows[0], rows[1][::-1]]
        assert whole_of_parts(unlike)[0] == unlike
        assert whole_of_parts([own[:3] for own in rows])[0] == [o[:3] for o in rows]


def test_what_is_packed_in_a_trace_depends_on_where_it_is_and_travels_to():
    with tf.Graph().as_default():
        every = [tf.Variable(tf.zeros([size])) * 1 for size in (5_000, 3, 7, 70_000)]
        gpus = ["/gpu:0", "/gpu:1"]

        def sizes(together, devices):
            packs = _packs(every, together, devices)
            return [[own.shape[0] for own in parts] for _, parts in packs]

        assert sizes({}, gpus) == [[5_000, 3, 7]]
        assert sizes({}, ["/gpu:0", ""]) == [[3, 7]]
        assert sizes({id(own): "/cpu:0" for own in every}, gpus) == [[3, 7]]
        assert sizes({id(every[1]): "/gpu:1"}, gpus) == [[5_000, 7]]


def test_sparse_gradients_stay_alone_as_they_are():
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]))
    plan = PackPlan(packs=((0, 2),), alone=(1,))
    packed = pack_tensors([tf.ones([2]), rows, tf.ones([])], plan)
    assert packed[1] is rows
    assert unpack_tensors(packed, plan, [(2,), None, ()])[1] is rows


def test_shapes_that_only_the_run_knows_are_joined_and_cut(graph):
    placeholder = tf.compat.v1.placeholder
    fed = [placeholder(tf.float32, shape) for shape in (None, [None], [2, 2])]
    parts = cut_flat(join_flat(fed), [(2,), (1,), (2, 2)])
    assert [part.shape for part in parts] == [(2,), (1,), (2, 2)]
    values = [[1.0, 2.0], [3.0], [[4.0, 5.0], [6.0, 7.0]]]
    flat = placeholder(tf.float32, [None])
    with tf.compat.v1.Session() as session:
        got = session.run(parts, dict(zip(fed, values, strict=True)))
        for shapes in ([(2,)], [(2,), (3, 1)]):  # of another length than 9
            with pytest.raises(tf.errors.InvalidArgumentError):
                session.run(cut_flat(flat, shapes), {flat: np.ones(9)})
    for g, value in zip(got, values, strict=True):
        np.testing.assert_array_equal(g, value)


def test_a_vector_is_joined_and_cut_without_a_reshape_on_the_device_in_scope(graph):
    with tf.device("/cpu:1"):
        tensors = [tf.ones([2]), tf.ones([3])]
    with tf.device("/cpu:2"):
        flat = join_flat(tensors)
    with tf.device("/cpu:3"):
        parts = cut_flat(flat, [(2,), (3,)])
    assert not [op for op in graph.get_operations() if op.type == "Reshape"]
    assert flat is join_flat([flat])
    assert flat.device == "/device:CPU:2"
    assert {part.device for part in parts} == {"/device:CPU:3"}


@pytest.mark.parametrize("count", [4, 5, 15, 16])
def test_few_tensors_are_joined_on_a_gpu_by_one_copy(count):
    given = arrays([*SHAPES, *[(2, 4)] * 12][: count + 2])  # two of them are empty

    @tf.function(autograph=False)
    def join():
        with tf.device("/gpu:0"):  # or what there is in its place
            return join_flat([tf.identity(own) for own in given])

    joins = join.get_concrete_function().graph.get_operations()
    [inputs] = [own.get_attr("N") for own in joins if own.type == "ConcatV2"]
    assert inputs == {4: 6, 5: 18, 15: 18, 16: 18}[count]
    np.testing.assert_array_equal(join(), np.concatenate([a.ravel() for a in given]))
