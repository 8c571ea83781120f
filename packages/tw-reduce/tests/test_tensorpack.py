"""tensorpack's names: its arguments and results, and what it refused or skipped."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from reduce_given import (
    KEYS,
    MODES,
    assert_rows,
    each_mode,
    on_towers,
    steps,
    sums_of,
    whole_numbers,
)

from tw_core.testing import CPUS, SparseRows, run_in_function
from tw_reduce import reducer_for_mode
from tw_reduce.tensorpack import (
    GradientPacker,
    aggregate_grads_colocate,
    allreduce_grads,
    allreduce_grads_hierarchical,
    allreduce_grads_naive,
)


def towers_of(num_towers):
    return whole_numbers(num_towers, [(3,), (2, 4), ()])


# name -> K, reducer of sums, and whether it is told to average
SUMS = {
    "allreduce_grads": (4, partial(allreduce_grads, mode="collective", keys=KEYS)),
    "hierarchical": (8, partial(allreduce_grads_hierarchical, devices=CPUS)),
    "naive": (4, lambda grads, average: [allreduce_grads_naive(grads, None, average)]),
    "naive on two": (
        4,
        lambda grads, average: [allreduce_grads_naive(grads, CPUS[:2], average)],
    ),
}


@each_mode
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_tensorpacks_functions_give_sums_or_means(mode, average, name):
    count, reducer = SUMS[name]
    towers = towers_of(count)
    got = MODES[mode](partial(on_towers, partial(reducer, average=average)), towers)
    assert len(got) == (1 if "naive" in name else count)
    divisor = np.float32(count if average else 1)
    assert_rows(got, [total / divisor for total in sums_of(towers)])


@each_mode
@pytest.mark.parametrize("name", ["cpu", "gpu", "collective", "hierarchical"])
def test_a_mode_name_is_a_reducer(mode, name):
    towers = towers_of(8 if name == "hierarchical" else 2)
    reducer = reducer_for_mode(name, CPUS[: len(towers)], keys=KEYS)
    assert_rows(MODES[mode](partial(on_towers, reducer), towers), sums_of(towers))


@pytest.mark.parametrize("average", [False, True])
def test_aggregate_grads_colocate_adds_where_each_variable_lives(average, graph):
    towers = whole_numbers(3, [(3,), (2, 4), (5,), (40_000,)])
    variables = []
    for n, grad in enumerate(towers[0]):
        with tf.device(CPUS[n % 2 + 3]):
            variables.append(tf.compat.v1.get_variable(f"v{n}", grad.shape))
    pairs = [list(zip(map(tf.constant, t), variables, strict=True)) for t in towers]
    got = aggregate_grads_colocate(pairs, average=average)
    assert [variable for _, variable in got] == variables
    for grad, variable in got:
        assert grad.device == variable.device
    config = tf.compat.v1.ConfigProto(device_count={"CPU": 8})
    with tf.compat.v1.Session(config=config) as session:
        values = session.run([grad for grad, _ in got])
    for value, total in zip(values, sums_of(towers), strict=True):
        np.testing.assert_allclose(value, total / (3 if average else 1), rtol=1e-6)


def test_aggregate_grads_colocate_keeps_sparse_gradients_sparse():
    shape = np.array([5, 2], np.int64)
    rows = [
        SparseRows(np.ones((2, 2), np.float32), np.array([k, 3]), shape)
        for k in range(2)
    ]
    variable = tf.Variable(tf.zeros([5, 2]))

    def fn(grads):
        [(grad, own)] = aggregate_grads_colocate([[(g, variable)] for g in grads])
        assert own is variable
        return grad

    got = run_in_function(fn, rows).to_dense()
    np.testing.assert_array_equal(got, (rows[0].to_dense() + rows[1].to_dense()) / 2)


@each_mode
@pytest.mark.parametrize("num_split", [1, 3, 8])
def test_the_packer_gives_every_gradient_back(mode, num_split):
    towers = whole_numbers(2, [(100, 90), (7,), (), (33, 11)])
    towers = [[*own, np.arange(9_000, dtype=np.float64)] for own in towers]

    def fn(grads):
        packer = GradientPacker(num_split)
        assert packer.compute_strategy(grads[0]) is True
        packs = packer.pack_all(grads, CPUS[:2])
        assert [len(row) for row in packs] == [2 * num_split] * 2  # of two dtypes
        return packer.unpack_all(packs, CPUS[:2])

    for row, tower in zip(MODES[mode](fn, towers), towers, strict=True):
        assert_rows([row], tower)


def test_the_packer_says_when_it_cannot_pack(graph, caplog):
    def can(*grads, num_split=1):
        return GradientPacker(num_split).compute_strategy(list(grads))

    assert can(tf.ones(100), num_split=8) is False
    assert can(tf.compat.v1.placeholder(tf.float32, [None])) is False
    rows = tf.IndexedSlices(tf.ones([2000, 2]), tf.range(2000), tf.constant([5000, 2]))
    with caplog.at_level("WARNING", "tw_reduce"):
        assert can(tf.ones([4000]), rows) is False
    assert "sparse or of unknown shape: [1]" in caplog.text


@each_mode
def test_the_packer_compares_in_the_run_what_it_does_not_know(mode):
    shapes = [(60, 50), (3,)]
    grads = [np.full(shape, 2, np.float32) for shape in shapes]

    def there_and_back(*later):
        packer = GradientPacker(2)
        assert packer.compute_strategy([tf.ones(shape) for shape in shapes])
        pieces = packer.pack(later[:2])
        return packer.unpack([later[2], *pieces[1:]])

    specs = [tf.TensorSpec(None), tf.TensorSpec([None]), tf.TensorSpec(None)]
    step = steps(mode, there_and_back, specs)
    piece = np.full([1501], 5, np.float32)
    got = step(*grads, piece)
    np.testing.assert_array_equal(np.ravel(got[0])[:1501], piece)
    np.testing.assert_array_equal(got[1], grads[1])
    wrong = {
        r"(?s)(?=.*gradient_shape/pack_position0).*\[50,60\] .*\[60,50\]": (
            grads[0].T,
            grads[1],
            piece,
        ),
        r"(?s)(?=.*gradient_shape/pack_position1).*\[4\] .*expected shape \[3\]": (
            grads[0],
            np.ones(4, np.float32),
            piece,
        ),
        r"(?s)(?=.*gradient_shape/unpack_position0).*\[1,1501\] .*\[1501\]": (
            *grads,
            piece[None],
        ),
    }
    for message, fed in wrong.items():
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            step(*fed)


@each_mode
def test_a_variables_gradients_of_unknown_shape_are_compared_in_the_run(mode):
    def add(one, other, variable):
        pairs = [[(grad, variable)] for grad in (one, other)]
        return [grad for grad, _ in aggregate_grads_colocate(pairs)]

    def make():
        return [tf.Variable(tf.zeros([3, 2]), name="table")]

    good = [np.full([3, 2], k, np.float32) for k in (1, 3)]
    step = steps(mode, add, [tf.TensorSpec(None), tf.TensorSpec([None, 2])], make)
    np.testing.assert_array_equal(step(*good)[0], np.full([3, 2], 2))
    wanted = r"(?s)(?=.*check_gradient_shape/tower1/table).*\[4,2\] is not .*\[3,2\]"
    with pytest.raises(tf.errors.InvalidArgumentError, match=wanted):
        step(good[0], np.ones([4, 2], np.float32))


def test_gradients_of_keras_variables_are_added_where_those_are():
    with tf.device(CPUS[1]):
        variables = [keras.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])]
    pairs = [[(tf.constant([k, 2.0]), v) for v in variables] for k in (1.0, 3.0)]
    reduced = aggregate_grads_colocate(pairs)
    assert all(v is own for (_, v), own in zip(reduced, variables, strict=True))
    for grad, _ in reduced:
        assert grad.device.endswith("CPU:1")
        np.testing.assert_array_equal(grad, [2, 2])
