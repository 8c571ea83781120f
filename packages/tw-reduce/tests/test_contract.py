"""What every reducer promises: the same properties for all of them, in both modes."""

import re
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from reduce_given import (
    MODES,
    REDUCERS,
    assert_rows,
    balanced,
    each_mode,
    each_reducer,
    on_towers,
    steps,
    sums_of,
    whole_numbers,
)

from tw_core.testing import CPUS, SparseRows
from tw_reduce import (
    accumulate_as,
    broadcast,
    compress,
    mean,
    packed,
    partition,
    sum_balanced,
    sum_on_device,
    sum_round_robin,
)

STAY_SPARSE = [name for name in REDUCERS if "collective" not in name]
# On both sides of the elements (4,096) from which packs leave a tensor alone.
SHAPES = [(), (3,), (2, 4), (0,), (4_095,), (64, 64), (130, 130)]
OTHERS = [np.float64, np.float16, tf.bfloat16.as_numpy_dtype]


def reduce(mode, name, towers, change=lambda reducer: reducer):
    reducer = change(REDUCERS[name](len(towers)))
    return MODES[mode](partial(on_towers, reducer), towers)


@each_mode
@pytest.mark.parametrize("num_towers", [1, 2, 5])
@each_reducer
def test_every_tower_gets_the_sums_and_means_of_numpy(mode, num_towers, name):
    floats = whole_numbers(num_towers, SHAPES)
    for dtype in OTHERS:
        more = whole_numbers(num_towers, [(2, 5), (65, 64)], dtype)
        floats = [[*own, *other] for own, other in zip(floats, more, strict=True)]
    ints = whole_numbers(num_towers, [(4,), (2, 2)], np.int32)
    towers = [[*own, *other] for own, other in zip(floats, ints, strict=True)]
    reducer = REDUCERS[name](num_towers)

    def both(grads):
        return reducer(grads), mean(reducer)(
            [tower[: len(floats[0])] for tower in grads]
        )

    sums, means = MODES[mode](partial(on_towers, both), towers)
    want = sums_of(towers)
    assert len(sums) == len(means) == num_towers
    assert_rows(sums, want)
    for row in means:
        for value, total in zip(row, want, strict=False):
            assert value.dtype == total.dtype
            wanted = np.asarray(total, np.float64) / num_towers
            rtol = 1e-2 if value.dtype.itemsize < 4 else 1e-6
            np.testing.assert_allclose(np.asarray(value, np.float64), wanted, rtol=rtol)


def sparse(rows, indices, num_rows=6):
    values = np.asarray(rows, np.float32)
    shape = np.array([num_rows, *values.shape[1:]], np.int64)
    return SparseRows(values, np.asarray(indices, np.int64), shape)


SPARSE = [
    sparse([[1, 2], [3, 4], [5, 6]], [4, 0, 4]),  # unsorted, one row twice
    sparse([[10, 20]], [4]),
    sparse(np.zeros((0, 2)), []),
]


@each_mode
@pytest.mark.parametrize("num_towers", [1, 2, 3])
@each_reducer
def test_sparse_gradients_add_up_among_dense_ones(mode, num_towers, name):
    dense = whole_numbers(num_towers, [(3,), (6, 2), (4_096,)])
    towers = [  # the third is sparse in one tower only
        [own[0], SPARSE[k], SPARSE[k] if k == 1 else own[1], own[2]]
        for k, own in enumerate(dense)
    ]
    reducer = REDUCERS[name](num_towers)
    sums, means = MODES[mode](
        partial(on_towers, lambda grads: (reducer(grads), mean(reducer)(grads))), towers
    )
    full = [
        [g.to_dense() if isinstance(g, SparseRows) else g for g in own]
        for own in towers
    ]
    for rows, divisor in (sums, 1), (means, num_towers):
        for row in rows:
            stays = isinstance(row[1], SparseRows)
            assert stays == (num_towers == 1 or name in STAY_SPARSE)
            row[1] = row[1].to_dense() if stays else row[1]
            for value, total in zip(row, sums_of(full), strict=True):
                np.testing.assert_allclose(value, total / divisor, rtol=1e-6)


@each_mode
@pytest.mark.parametrize("num_towers", [1, 2, 4])
@pytest.mark.parametrize("name", STAY_SPARSE)
def test_rows_that_no_tower_repeats_are_not_repeated(mode, num_towers, name):
    towers = [[np.arange(k, k + 3)] for k in range(num_towers)]
    reducer = mean(REDUCERS[name](num_towers))

    def mean_of_rows(towers):
        rows = []
        for [own] in towers:
            own = tf.unique(own)[0]
            rows.append(
                [tf.IndexedSlices(tf.one_hot(own, 8), own, tf.constant([8, 8]))]
            )
        return on_towers(reducer, rows)

    want = sum(np.eye(8)[own[0]].sum(0) for own in towers) / num_towers
    for [got] in MODES[mode](mean_of_rows, towers):
        assert list(got.indices) == list(range(num_towers + 2))
        np.testing.assert_array_equal(np.diag(got.to_dense()), want)


@each_mode
@pytest.mark.parametrize("wire", [tf.float16, tf.bfloat16])
@pytest.mark.parametrize("name", ["on one device", "balanced", "packed balanced"])
def test_compress_rounds_on_the_wire_and_adds_in_float32(mode, wire, name):
    random = np.random.default_rng(1)
    towers = [[random.standard_normal(50).astype(np.float32)] for _ in range(4)]
    rounded = [own[0].astype(wire.as_numpy_dtype).astype(np.float32) for own in towers]
    want = np.sum(rounded, axis=0)
    for [value] in reduce(mode, name, towers, partial(compress, dtype=wire)):
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, want, rtol=1e-6, atol=1e-6)
        assert not np.allclose(value, sums_of(towers)[0], rtol=1e-6)


@each_mode
@each_reducer
def test_the_same_inputs_give_the_same_bits_in_every_run_and_tower(mode, name):
    # That TensorFlow leaves larger sums alone is shown by test_add_columns.py.
    random = np.random.default_rng(2)
    towers = [
        [
            random.random(shape, np.float32)
            for shape in [(200_000,), (7,), (300, 30), ()]
        ]
        for _ in range(4)
    ]
    runs = [reduce(mode, name, towers) for _ in range(2)]
    bits = {
        b"".join(np.asarray(t).tobytes() for t in row) for run in runs for row in run
    }
    assert len(bits) == 1


def run_with_static_shapes(mode, reducer, shapes, dtypes=None):
    """Returns what reduces [K][N] arrays, of which [K][N] shapes are known before."""
    count = len(shapes[0])
    dtypes = dtypes or [np.float32] * count
    specs = [s for tower in shapes for s in map(tf.TensorSpec, tower, dtypes)]

    def reduced(*flat):
        towers = [flat[n : n + count] for n in range(0, len(flat), count)]
        return on_towers(reducer, towers)

    step = steps(mode, reduced, specs)
    return lambda towers: step(*[value for tower in towers for value in tower])


KNOWN_IN_PART = {  # and which tower brings what else; of six elements: added up
    "by the first tower": ([[2, 3], None, [None, 3]], 1, (3, 2)),
    "by the second tower": ([None, [2, 3], None], 2, (3, 2)),
    "by the last tower": ([[None, None], [None, 3], [2, 3]], 0, (7, 3)),
    "by no tower alone": ([[2, None], None, [None, 3]], 1, (3, 2)),
    "by none in one dimension": ([[None, 3], [None, 3], None], 2, (3, 2)),
    "by none": ([None, None, None], 0, (6,)),
}


@each_mode
@pytest.mark.parametrize("known", KNOWN_IN_PART)
@each_reducer
def test_shapes_that_some_towers_know_are_compared_in_the_run(mode, known, name):
    shapes, wrong_tower, wrong_shape = KNOWN_IN_PART[known]
    shapes = [[[5], shape, shape, [4_100], None] for shape in shapes]
    good = whole_numbers(3, [(5,), (2, 3), (2, 3), (4_100,), (70, 80)])
    bad = [list(tower) for tower in good]
    bad[wrong_tower][1] = np.ones(wrong_shape, np.float32)
    run = run_with_static_shapes(mode, REDUCERS[name](3), shapes)
    for _ in range(2):
        assert_rows(run(good), sums_of(good))
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            run(bad)
        assert "position 1 must have one shape over all towers" in str(caught.value)


@each_reducer
@each_mode
def test_a_step_may_have_any_number_of_rows(mode, name):
    shapes = [[[None, 3], None, [None, None]]] * 2
    run = run_with_static_shapes(mode, REDUCERS[name](2), shapes)
    for num_rows in (0, 4):
        towers = whole_numbers(2, [(num_rows, 3)] * 3)
        assert_rows(run(towers), sums_of(towers))


@each_mode
def test_what_differs_in_the_run_is_told_with_tensors_and_shapes(mode):
    reducer = mean(packed(balanced(2)))
    run = run_with_static_shapes(mode, reducer, [[[5], [3]], [None, None]])
    five, three = np.zeros(5, np.float32), np.zeros(3, np.float32)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        run([[five, three], [three, five]])
    assert re.search(
        r"\[The gradients at position [01] must have one shape over all towers; check "
        r"that every tower lists its variables in the same order\. "
        r"Tensors Identity\w*:0, Identity\w*:0 had shapes\] "
        r"\[tower 0:\] \[(5|3)\] \[tower 1:\] \[(5|3)\]",
        str(caught.value),
    )


@each_mode
@each_reducer
def test_rows_of_unknown_shape_are_compared_in_the_run(mode, name):
    def reducer(grads):
        # What a gradient is when the table's size and rows are not known.
        towers = [[tf.IndexedSlices(*tower)] for tower in grads]
        return [[tf.convert_to_tensor(t) for t in row] for row in own(towers)]

    own = REDUCERS[name](2)
    shapes = [[None, [None], [None]], [[None, 2], [None], [None]]]
    run = run_with_static_shapes(
        mode, reducer, shapes, [np.float32, np.int64, np.int64]
    )

    def tower(row_shape, dense_shape):
        values = np.ones((2, *row_shape), np.float32)
        return [values, np.array([1, 1]), np.array(dense_shape)]

    good = [tower([2], [3, 2])] * 2
    for bad in (tower([3], [3, 3]), tower([2], [4, 2]), tower([3], [3, 2])):
        for _ in range(2):
            with pytest.raises(tf.errors.InvalidArgumentError) as caught:
                run([bad, good[1]])
            assert "position 0 must have one shape over all" in str(caught.value)
        for [value] in run(good):
            np.testing.assert_array_equal(value, [[0, 0], [4, 4], [0, 0]])


@pytest.mark.parametrize("name", ["packed balanced", "collective", "all_reduce"])
def test_static_rows_and_dense_shapes_are_compared(name, graph):
    def slices(row, dense_shape=None):
        shape = None if dense_shape is None else tf.constant(dense_shape)
        return tf.IndexedSlices(tf.ones([1, *row]), tf.constant([0]), shape)

    placeholder = partial(tf.compat.v1.placeholder, tf.float32)
    wrong = {
        r"'\(None, 2\)', '\(None, 3\)'": [slices([2]), slices([3])],
        r"'\(9, 2\)', '\(5, 2\)'": [slices([2], [9, 2]), slices([2], [5, 2])],
        r"'\(9, 3\) of rows \(2,\)'": [slices([2], [9, 3]), slices([2], [9, 3])],
        r"'\(9, 2\)', '\(9, 3\)'": [slices([2], [9, 2]), tf.ones([9, 3])],
        r"'\(None,\)', '\(\)'": [slices([]), tf.ones([])],
        r"towers 0\.\.2": map(placeholder, ([None], [3], [4])),
        r" towers 0\.\.2": map(placeholder, (None, [2, 3], [3, 2])),
    }
    for message, column in wrong.items():
        column = list(column)
        wanted = rf"position 1 has gradients of shapes .*{message}"
        with pytest.raises(ValueError, match=wanted):
            REDUCERS[name](len(column))([[tf.ones(3), grad] for grad in column])
    grads = [[None, tf.ones(2), None], [None] * 3]
    wanted = r"(?s)0 has gradient None in towers \[0, 1\].*2 .*\[0, 1\].*1 .*\[1\]"
    with pytest.raises(ValueError, match=wanted):
        REDUCERS[name](2)(grads)


@each_reducer
def test_a_reducer_costs_no_checks_and_no_variables_and_leaves_lists_alone(name, graph):
    grads = [[tf.ones([3]), tf.ones([2, 2])] for _ in range(2)]
    before = [list(map(id, tower)) for tower in grads]
    first, second = REDUCERS[name](2)(grads)
    kinds = {op.type for op in graph.get_operations()}
    assert not kinds & {"Assert", "EnsureShape", "Shape"}  # of known shapes
    assert tf.compat.v1.trainable_variables() == []
    assert tf.compat.v1.global_variables() == []
    assert [list(map(id, tower)) for tower in grads] == before
    first.append("changed")
    assert len(second) == 2
    assert not getattr(REDUCERS[name](2), "averages", False)
    assert mean(REDUCERS[name](2)).averages


@each_reducer
def test_operations_grow_linearly_with_towers_and_variables(name):
    def count(num_towers, num_variables):
        with tf.Graph().as_default() as graph:
            grads = []
            for device in CPUS[:num_towers]:
                with tf.device(device):
                    grads.append([tf.ones([20]) for _ in range(num_variables)])
            before = len(graph.get_operations())
            REDUCERS[name](num_towers)(grads)
            return len(graph.get_operations()) - before

    two, three, four = (count(2, n) for n in (4, 8, 16))
    assert four - three <= 2 * (three - two)
    two, three, four = (count(k, 4) for k in (2, 4, 8))
    assert four - three <= 2 * (three - two) + 2
    assert count(8, 16) <= 14 * 8 * 16


def test_sums_are_made_where_their_reducer_says(graph):
    grads = [[tf.ones([20]), tf.ones([3]), tf.ones([4])] for _ in range(2)]
    [one, _] = sum_on_device(grads, device=CPUS[5])
    assert {tensor.device for tensor in one} == {"/device:CPU:5"}
    [turns, _] = sum_round_robin(grads, devices=CPUS[1:3])
    assert [tensor.device[-1] for tensor in turns] == ["1", "2", "1"]
    grads = [[tf.ones([size]) for size in (10, 1000, 400, 500)] for _ in range(2)]
    [sums, _] = sum_balanced(grads, devices=CPUS[:2])  # the largest first
    assert [tensor.device[-1] for tensor in sums] == ["1", "0", "1", "1"]


def test_what_is_around_means_averages():
    means = mean(balanced(2))
    for around in (packed, broadcast, partial(accumulate_as, dtype=tf.float64)):
        assert around(means).averages
    assert partition(lambda _: "a", {"a": means, "b": means}).averages
    assert partition(lambda _: "a", {"a": means, "b": balanced(2)}).averages
    assert not partition(lambda _: "a", {"a": balanced(2)}).averages
