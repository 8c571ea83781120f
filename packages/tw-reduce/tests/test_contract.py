"""What every reducer promises: the same properties for all of them, in both modes."""

import re
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from tw_core.testing import CPUS, SparseRows, run_in_function, run_in_graph
from tw_reduce import (
    accumulate_as,
    all_reduce,
    auto,
    broadcast,
    compress,
    hierarchical,
    mean,
    packed,
    partition,
    sum_balanced,
    sum_collective,
    sum_on_device,
    sum_round_robin,
)
from tw_reduce.reducers import CollectiveKeys

KEYS = CollectiveKeys()  # one object for all reducers of the process
WAIT_S = 60.0


def groups_of(num_towers):
    half = (num_towers + 1) // 2
    both = (tuple(range(half)), tuple(range(half, num_towers)))
    return tuple(group for group in both if group)


def balanced(k):
    return partial(sum_balanced, devices=CPUS[:k])


def collective(k):
    return partial(sum_collective, devices=CPUS[:k], keys=KEYS, timeout_s=WAIT_S)


def by_kind(k):
    return partition(
        lambda info: "sparse" if info.is_sparse else "dense",
        {"sparse": balanced(k), "dense": packed(balanced(k), below_bytes=40)},
    )


# name -> K -> reducer of sums
REDUCERS = {
    "on one device": lambda k: partial(sum_on_device, device=CPUS[0]),
    "round robin": lambda k: partial(sum_round_robin, devices=CPUS[:k]),
    "balanced": balanced,
    "hierarchical": lambda k: hierarchical(groups_of(k), devices=CPUS[:k]),
    "collective": collective,
    "packed balanced": lambda k: packed(balanced(k), below_bytes=40),
    "packed broadcast": lambda k: packed(broadcast(balanced(k))),
    "broadcast": lambda k: broadcast(balanced(k)),
    "packed collective": lambda k: packed(collective(k)),
    "on own devices": lambda k: hierarchical(groups_of(k)),
    "packed hierarchical": lambda k: packed(REDUCERS["hierarchical"](k)),
    "compress": lambda k: packed(compress(balanced(k), tf.bfloat16)),
    "accumulate as": lambda k: accumulate_as(balanced(k), tf.float64),
    "partition": by_kind,
    "auto": lambda k: auto(CPUS[:k]),
    "all_reduce": lambda k: all_reduce(CPUS[:k]),
}
STAY_SPARSE = [name for name in REDUCERS if "collective" not in name]
MODES = {"graph": run_in_graph, "function": run_in_function}
each_reducer = pytest.mark.parametrize("name", REDUCERS)
each_mode = pytest.mark.parametrize("mode", MODES)
each_count = pytest.mark.parametrize("num_towers", [1, 2, 3, 4, 8])
# On both sides of the elements (4,096) from which packs leave a tensor alone.
SHAPES = [(), (3,), (2, 4), (5, 7), (1,), (0,), (4_095,), (64, 64), (130, 130)]


def whole_numbers(num_towers, shapes=SHAPES, dtype=np.float32, seed=0):
    """Small whole numbers, whose sums are exact in every order."""
    random = np.random.default_rng(seed)
    return [
        [np.asarray(random.integers(-8, 9, shape)).astype(dtype) for shape in shapes]
        for _ in range(num_towers)
    ]


def total(column):
    # Python's sum begins with an int, with which older NumPy widens a scalar.
    return np.sum(column, axis=0, dtype=column[0].dtype)


def on_towers(fn, grads):
    """Puts tower k's gradients on its device, as a backward pass leaves them."""
    placed = []
    for device, tower in zip(CPUS, grads, strict=False):
        with tf.device(device):
            placed.append(
                [
                    None
                    if grad is None
                    else tf.nest.map_structure(
                        tf.identity, grad, expand_composites=True
                    )
                    for grad in tower
                ]
            )
    return fn(placed)


def reduce(mode, name, towers, change=lambda reducer: reducer):
    reducer = change(REDUCERS[name](len(towers)))
    return MODES[mode](partial(on_towers, reducer), towers)


@each_mode
@each_count
@each_reducer
def test_every_tower_gets_the_numpy_sum(mode, num_towers, name):
    towers = whole_numbers(num_towers)
    want = [total(column) for column in zip(*towers, strict=True)]
    got = reduce(mode, name, towers)
    assert len(got) == num_towers
    for row in got:
        for value, wanted in zip(row, want, strict=True):
            np.testing.assert_array_equal(value, wanted)
            assert value.dtype == wanted.dtype
            assert value.shape == wanted.shape


@each_mode
@pytest.mark.parametrize("num_towers", [1, 3])
@each_reducer
def test_mean_gives_the_numpy_mean(mode, num_towers, name):
    towers = whole_numbers(num_towers)
    want = [total(column) / num_towers for column in zip(*towers, strict=True)]
    for row in reduce(mode, name, towers, mean):
        for value, wanted in zip(row, want, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-6)


@each_mode
@pytest.mark.parametrize(
    "dtype", [np.float16, tf.bfloat16.as_numpy_dtype, np.float64, np.int32]
)
@each_reducer
def test_other_dtypes_are_added_and_kept(mode, dtype, name):
    towers = whole_numbers(2, [(3,), (2, 5), (65, 64)], dtype)
    for row in reduce(mode, name, towers):
        for value, *column in zip(row, *towers, strict=True):
            assert value.dtype == column[0].dtype
            np.testing.assert_array_equal(value, column[0] + column[1])


@each_mode
@each_reducer
def test_mixed_dtypes_are_each_added_in_their_own(mode, name):
    dtypes = [np.float32, np.float64, np.float16, np.float32]
    towers = [
        [np.full((3,), k + n, dtype) for n, dtype in enumerate(dtypes)]
        for k in range(2)
    ]
    for row in reduce(mode, name, towers):
        for n, (value, dtype) in enumerate(zip(row, dtypes, strict=True)):
            assert value.dtype == dtype
            np.testing.assert_array_equal(value, np.full((3,), 2 * n + 1, dtype))


def sparse(rows, indices, num_rows=6):
    values = np.asarray(rows, np.float32)
    shape = np.array([num_rows, *values.shape[1:]], np.int64)
    return SparseRows(values, np.asarray(indices, np.int64), shape)


SPARSE_TOWERS = [
    [sparse([[1, 2], [3, 4], [5, 6]], [4, 0, 4])],  # unsorted, one row twice
    [sparse([[10, 20]], [4])],
    [sparse(np.zeros((0, 2)), [])],
]


@each_mode
@pytest.mark.parametrize("num_towers", [1, 2, 3])
@each_reducer
def test_sparse_gradients_add_up_with_duplicates_and_in_any_order(
    mode, num_towers, name
):
    towers = SPARSE_TOWERS[:num_towers]
    want = sum(tower[0].to_dense() for tower in towers)
    for [value] in reduce(mode, name, towers):
        if num_towers > 1 and name not in STAY_SPARSE:
            assert isinstance(value, np.ndarray)
        else:
            assert isinstance(value, SparseRows)
            value = value.to_dense()
        np.testing.assert_array_equal(value, want)


@each_mode
@pytest.mark.parametrize("num_towers", [1, 2, 4])
@pytest.mark.parametrize("name", STAY_SPARSE)
def test_rows_that_no_tower_repeats_are_not_repeated(mode, num_towers, name):
    towers = [[np.arange(k, k + 3)] for k in range(num_towers)]
    reducer = mean(REDUCERS[name](num_towers))

    def mean_of_rows(towers):
        indices = [tf.unique(own)[0] for [own] in towers]
        return on_towers(reducer, [[one_hot_rows(own)] for own in indices])

    want = sum(np.eye(8)[own[0]].sum(0) for own in towers) / num_towers
    for [got] in MODES[mode](mean_of_rows, towers):
        assert list(got.indices) == list(range(num_towers + 2))
        np.testing.assert_array_equal(np.diag(got.to_dense()), want)


def one_hot_rows(indices):
    return tf.IndexedSlices(tf.one_hot(indices, 8), indices, tf.constant([8, 8]))


@each_mode
@each_reducer
def test_the_mean_of_sparse_gradients_divides_by_the_towers(mode, name):
    towers = SPARSE_TOWERS[:2]
    want = sum(tower[0].to_dense() for tower in towers) / 2
    for [value] in reduce(mode, name, towers, mean):
        dense = value.to_dense() if isinstance(value, SparseRows) else value
        np.testing.assert_array_equal(dense, want)


@each_mode
@each_reducer
def test_lists_of_dense_and_sparse_gradients_work(mode, name):
    dense = whole_numbers(2, [(3,), (2, 2), (4,), (4_096,)])
    towers = [[row[0], SPARSE_TOWERS[k][0], *row[1:]] for k, row in enumerate(dense)]
    for row in reduce(mode, name, towers):
        for n, column in ((0, 0), (2, 1), (3, 2), (4, 3)):
            np.testing.assert_array_equal(row[n], dense[0][column] + dense[1][column])
        value = row[1].to_dense() if isinstance(row[1], SparseRows) else row[1]
        np.testing.assert_array_equal(
            value, SPARSE_TOWERS[0][0].to_dense() + SPARSE_TOWERS[1][0].to_dense()
        )


@each_mode
@each_reducer
def test_a_column_sparse_in_one_tower_only_becomes_dense(mode, name):
    dense = np.arange(12, dtype=np.float32).reshape(6, 2)
    towers = [[dense], [SPARSE_TOWERS[1][0]]]
    want = dense + SPARSE_TOWERS[1][0].to_dense()
    for [value] in reduce(mode, name, towers):
        np.testing.assert_array_equal(value, want)


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
        assert not np.allclose(value, np.sum([t[0] for t in towers], axis=0), rtol=1e-6)


@each_mode
@each_reducer
def test_the_same_inputs_give_the_same_bits_in_every_run_and_tower(mode, name):
    random = np.random.default_rng(2)
    shapes = [(20_000,), (7,), (300, 30), ()]
    towers = [
        [random.standard_normal(shape).astype(np.float32) for shape in shapes]
        for _ in range(4)
    ]
    runs = [reduce(mode, name, towers) for _ in range(3)]
    bits = {
        b"".join(np.asarray(t).tobytes() for t in row) for run in runs for row in run
    }
    assert len(bits) == 1


@each_mode
@each_reducer
def test_large_tensors_too_have_the_same_bits_in_every_run(mode, name):
    # That TensorFlow leaves such sums alone is shown by test_add_columns.py.
    random = np.random.default_rng(3)
    towers = [[random.random(2_000_000, np.float32)] for _ in range(4)]
    first, *others = [reduce(mode, name, towers)[0][0] for _ in range(3)]
    for other in others:
        np.testing.assert_array_equal(first, other)


@each_reducer
def test_shapes_may_be_unknown_until_the_run(name):
    shapes = [[None, 3], None, [None, None]]
    with tf.Graph().as_default():
        fed = [
            [tf.compat.v1.placeholder(tf.float32, shape) for shape in shapes]
            for _ in range(2)
        ]
        results = REDUCERS[name](2)(fed)
        config = tf.compat.v1.ConfigProto(device_count={"CPU": 8})
        with tf.compat.v1.Session(config=config) as session:
            for num_rows in (0, 4):
                feeds = {
                    tensor: np.full((num_rows, 3), k + 1, np.float32)
                    for k, tower in enumerate(fed)
                    for tensor in tower
                }
                for row in session.run(results, feeds):
                    for value in row:
                        np.testing.assert_array_equal(value, np.full((num_rows, 3), 3))


def run_with_static_shapes(mode, reducer, shapes, dtypes=None):
    """Builds a reducer on tensors of static shapes.

    Args:
      mode: "graph" or "function".
      reducer: [K][N] -> [K][N].
      shapes: [K][N] what is known while building.
      dtypes: [N]; by default float32.

    Returns:
      What runs the step: takes [K][N] arrays, and returns [K][N] arrays.
    """
    dtypes = dtypes or [np.float32] * len(shapes[0])
    spec = [list(map(tf.TensorSpec, tower, dtypes)) for tower in shapes]
    if mode == "function":
        step = tf.function(
            partial(on_towers, reducer), autograph=False, input_signature=[spec]
        )
        return lambda grads: [
            [value.numpy() for value in row]
            for row in step([list(map(tf.constant, tower)) for tower in grads])
        ]
    with tf.Graph().as_default() as graph:
        fed = [list(map(tf.compat.v1.placeholder, dtypes, tower)) for tower in shapes]
        results = on_towers(reducer, fed)
        config = tf.compat.v1.ConfigProto(device_count={"CPU": len(CPUS)})
        session = tf.compat.v1.Session(graph=graph, config=config)

    def run(grads):
        feeds = {
            tensor: value
            for tensors, values in zip(fed, grads, strict=True)
            for tensor, value in zip(tensors, values, strict=True)
        }
        return session.run(results, feeds)

    return run


KNOWN_IN_PART = {
    "by the first tower": [[2, 3], None, [None, 3]],
    "by the second tower": [None, [2, 3], None],
    "by the last tower": [[None, None], [None, 3], [2, 3]],
    "by no tower alone": [[2, None], None, [None, 3]],
    "by none in one dimension": [[None, 3], [None, 3], None],
    "by none": [None, None, None],
}


@each_mode
@pytest.mark.parametrize("known", KNOWN_IN_PART)
@each_reducer
@pytest.mark.each_choice
def test_what_some_towers_know_of_a_shape_serves_all(mode, known, name):
    shapes = [[shape, [5], shape, [4_100], None] for shape in KNOWN_IN_PART[known]]
    grads = whole_numbers(3, [(2, 3), (5,), (2, 3), (4_100,), (70, 80)])
    want = [total(column) for column in zip(*grads, strict=True)]
    run = run_with_static_shapes(mode, REDUCERS[name](3), shapes)
    for _ in range(2):
        for row in run(grads):
            for value, wanted in zip(row, want, strict=True):
                np.testing.assert_array_equal(value, wanted)


DIFFERENT = {  # which tower brings what; of six elements: added up as they lie
    "by the first tower": (1, (3, 2)),
    "by the second tower": (2, (3, 2)),
    "by the last tower": (0, (7, 3)),
    "by no tower alone": (1, (3, 2)),
    "by none in one dimension": (2, (3, 2)),
    "by none": (0, (6,)),
}


@each_mode
@pytest.mark.parametrize("known", KNOWN_IN_PART)
@each_reducer
def test_shapes_that_differ_in_the_run_are_refused_and_named(mode, known, name):
    shapes = [[[4], shape] for shape in KNOWN_IN_PART[known]]
    run = run_with_static_shapes(mode, REDUCERS[name](3), shapes)
    good = whole_numbers(3, [(4,), (2, 3)])
    bad = [list(tower) for tower in good]
    tower, shape = DIFFERENT[known]
    bad[tower][1] = np.ones(shape, np.float32)
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            run(bad)
        assert "position 1 must have one shape over all towers" in str(caught.value)
        for row in run(good):
            np.testing.assert_array_equal(row[1], sum(tower[1] for tower in good))


@each_mode
def test_what_differs_in_the_run_is_told_with_tensors_and_shapes(mode):
    reducer = mean(packed(REDUCERS["balanced"](2)))
    run = run_with_static_shapes(mode, reducer, [[[5], [3]], [None, None]])
    five, three = np.zeros(5, np.float32), np.zeros(3, np.float32)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        run([[five, three], [three, five]])
    assert re.search(
        r"\[The gradients at position [01] must have one shape over all towers; check "
        r"that every tower lists its variables in the same order\. "
        r"Tensors Identity\w*:0, Identity\w*:0 came with\] "
        r"\[tower 0:\] \[(5|3)\] \[tower 1:\] \[(5|3)\]",
        str(caught.value),
    )


@each_reducer
def test_static_rows_and_dense_shapes_are_compared(name):
    def slices(row, dense_shape=None):
        shape = None if dense_shape is None else tf.constant(dense_shape)
        return tf.IndexedSlices(tf.ones([1, *row]), tf.constant([0]), shape)

    with tf.Graph().as_default():
        wrong = {
            r"'\(None, 2\)', '\(None, 3\)'": [slices([2]), slices([3])],
            r"'\(9, 2\)', '\(5, 2\)'": [
                slices([2], [9, 2]),
                slices([2], [5, 2]),
            ],
            r"'\(9, 3\) of rows \(2,\)'": [slices([2], [9, 3]), slices([2], [9, 3])],
            r"'\(9, 2\)', '\(9, 3\)'": [
                slices([2], [9, 2]),
                tf.ones([9, 3]),
            ],
            r"'\(None,\)', '\(\)'": [slices([]), tf.ones([])],
        }
        for message, column in wrong.items():
            wanted = rf"position 1 has gradients of shapes .*{message}"
            with pytest.raises(ValueError, match=wanted):
                REDUCERS[name](2)([[tf.ones(3), grad] for grad in column])


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


@each_reducer
def test_known_shapes_cost_the_step_nothing(name):
    with tf.Graph().as_default() as graph:
        REDUCERS[name](2)([[tf.ones([3]), tf.ones([2, 2])] for _ in range(2)])
        kinds = {op.type for op in graph.get_operations()}
    assert not kinds & {"Assert", "EnsureShape", "Shape"}


@each_reducer
def test_static_shapes_are_compared_pairwise(name):
    with tf.Graph().as_default():
        for shapes in ([[None], [3], [4]], [None, [2, 3], [3, 2]]):
            grads = [[tf.compat.v1.placeholder(tf.float32, s)] for s in shapes]
            with pytest.raises(
                ValueError, match=r"position 0 has gradients of shapes .* towers 0\.\.2"
            ):
                REDUCERS[name](3)(grads)


@each_reducer
def test_the_callers_lists_are_left_alone_and_results_are_new_lists(name):
    with tf.Graph().as_default():
        grads = [[tf.ones([3]), tf.ones([2])] for _ in range(2)]
        before = [list(tower) for tower in grads]
        first, second = REDUCERS[name](2)(grads)
    assert all(
        one is other
        for tower, kept in zip(grads, before, strict=True)
        for one, other in zip(tower, kept, strict=True)
    )
    first.append("changed")
    assert len(second) == 2


@each_reducer
def test_reducing_makes_no_variables(name):
    with tf.Graph().as_default():
        grads = [[tf.ones([3]), tf.ones([2, 2])] for _ in range(2)]
        REDUCERS[name](2)(grads)
        assert tf.compat.v1.trainable_variables() == []
        assert tf.compat.v1.global_variables() == []


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

    in_variables = [count(2, n) for n in (10, 20, 40)]
    assert in_variables[2] - in_variables[1] <= 2 * (in_variables[1] - in_variables[0])
    in_towers = [count(k, 10) for k in (2, 4, 8)]
    assert in_towers[2] - in_towers[1] <= 2 * (in_towers[1] - in_towers[0]) + 2
    assert count(8, 40) <= 14 * 8 * 40


@pytest.mark.parametrize("name", ["broadcast", "packed broadcast", "collective"])
def test_results_lie_on_each_towers_device(name):
    with tf.Graph().as_default():
        grads = []
        for device in CPUS[:3]:
            with tf.device(device):
                grads.append([tf.ones([20]), tf.ones([3])])
        for device, row in zip(CPUS, REDUCERS[name](3)(grads), strict=False):
            assert {tensor.device for tensor in row} == {f"/device:CPU:{device[-1]}"}


def test_one_device_and_round_robin_add_where_they_say():
    with tf.Graph().as_default():
        grads = [[tf.ones([20]), tf.ones([3]), tf.ones([4])] for _ in range(2)]
        [one, _] = sum_on_device(grads, device=CPUS[5])
        assert {tensor.device for tensor in one} == {"/device:CPU:5"}
        [turns, _] = sum_round_robin(grads, devices=CPUS[1:3])
        assert [tensor.device[-1] for tensor in turns] == ["1", "2", "1"]


def test_sum_balanced_places_the_largest_first():
    with tf.Graph().as_default():
        grads = [[tf.ones([size]) for size in (10, 1000, 400, 500)] for _ in range(2)]
        [sums, _] = sum_balanced(grads, devices=CPUS[:2])
        assert [tensor.device[-1] for tensor in sums] == ["1", "0", "1", "1"]


@each_reducer
def test_none_is_refused_with_towers_and_positions(name):
    with tf.Graph().as_default():
        grads = [[tf.ones(2), None], [tf.ones(2), tf.ones(3)]]
        with pytest.raises(ValueError, match=r"1 has gradient None in towers \[0\]:"):
            REDUCERS[name](2)(grads)
        grads = [[None, tf.ones(2), None], [None] * 3]
        wanted = r"(?s)0 has gradient None in towers \[0, 1\].*2 .*\[0, 1\].*1 .*\[1\]"
        with pytest.raises(ValueError, match=wanted):
            REDUCERS[name](2)(grads)


@pytest.mark.parametrize(
    "wrap", [mean, packed, broadcast, partial(compress, dtype=tf.float16)]
)
def test_a_reducer_that_returns_another_shape_of_list_is_refused(wrap):
    def loses_one(grads):
        return [list(tower[:-1]) for tower in grads]

    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match=r"lists of lengths \[0, 0\]|\[1, 1\]"),
    ):
        wrap(loses_one)([[tf.ones(2), tf.ones(3)]] * 2)


@pytest.mark.parametrize("name", REDUCERS)
def test_a_reducer_says_whether_it_averages(name):
    assert not getattr(REDUCERS[name](2), "averages", False)
    assert mean(REDUCERS[name](2)).averages


def test_what_is_around_means_averages():
    means = mean(balanced(2))
    for around in (packed, broadcast, partial(accumulate_as, dtype=tf.float64)):
        assert around(means).averages
    assert partition(lambda _: "a", {"a": means, "b": means}).averages
    assert partition(lambda _: "a", {"a": means, "b": balanced(2)}).averages
    assert not partition(lambda _: "a", {"a": balanced(2)}).averages
