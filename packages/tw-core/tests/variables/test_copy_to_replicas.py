"""Every tower's variables become equal to tower 0's, in both modes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core import copy_to_replicas
from tw_core.devices import canonical_device
from tw_core.testing import CPUS, NUM_CPUS, run_eagerly, run_in_function

v1 = tf.compat.v1
DTYPES = [np.float32, np.float16, np.int64, np.bool_]


def values_of(number):
    shapes = zip([(), (3,), (2, 2), (1,)], DTYPES, strict=True)
    return [np.full(shape, number, dtype) for shape, dtype in shapes]


def make_lists(num_towers):
    """Makes [K][M] variables of several shapes and dtypes, one set a device."""
    lists = []
    for k in range(num_towers):
        with tf.device(CPUS[k]):
            lists.append([tf.Variable(value) for value in values_of(k + 1)])
    return lists


@pytest.mark.parametrize("num_towers", [1, 3])
@pytest.mark.parametrize("run", [run_in_function, run_eagerly])
def test_all_towers_have_tower_0s_values(run, num_towers):
    lists = make_lists(num_towers)

    def copy_and_read():
        copy_to_replicas(lists)
        return [[v.read_value() for v in tower] for tower in lists]

    for tower in run(copy_and_read):
        for value, expected in zip(tower, values_of(1), strict=True):
            assert value.dtype == expected.dtype
            np.testing.assert_array_equal(value, expected)


def test_a_graph_gets_an_op_that_reads_once_and_assigns_on_each_device(graph):
    lists = make_lists(4)
    before = len(graph.get_operations())
    op = copy_to_replicas(lists)
    made = graph.get_operations()[before:]
    reads = [own for own in made if own.type == "ReadVariableOp"]
    assigns = [own for own in made if own.type == "AssignVariableOp"]
    assert [canonical_device(own.device)[-1] for own in reads] == ["0"] * 4
    assert {canonical_device(own.device)[-1] for own in assigns} == {*"123"}
    assert copy_to_replicas(lists[:1]) is None
    assert copy_to_replicas([[], []]).type == "NoOp"
    with v1.Session(config=v1.ConfigProto(device_count={"CPU": NUM_CPUS})) as sess:
        sess.run(v1.global_variables_initializer())
        assert sess.run(lists[1][0]) == 2.0
        sess.run(lists[0][0].assign(5.0))
        sess.run(op)
        assert sess.run([tower[0] for tower in lists]) == [5.0] * 4


def test_keras_variables_are_copied():
    models = [keras.Sequential([keras.Input([3]), keras.layers.Dense(2)]) for _ in "ab"]
    copy_to_replicas([m.variables for m in models])
    for first, second in zip(*(m.get_weights() for m in models), strict=True):
        np.testing.assert_array_equal(first, second)


# What is refused.


def v(*shape, dtype=np.float32, name="v"):
    return tf.Variable(np.zeros(shape, dtype), name=name)


def test_lists_that_differ_are_refused_with_their_names():
    a, b, c = v(2, name="a"), v(2, name="b"), v(2, name="c")
    others = [v(3, name="a"), v(2, name="b"), v(2, dtype=np.float64, name="c")]
    for lists, *says in (
        (
            [[a, b], others[:1]],
            "got [2, 1] of them in towers 0..1: [['a:0', 'b:0'], ['a:0']]",
        ),
        (
            [[a, b, c], others],
            "number 0: [('a:0', '(2,)', 'float32'), ('a:0', '(3,)', 'float32')]",
            "number 2: [('c:0', '(2,)', 'float32'), ('c:0', '(2,)', 'float64')]",
        ),
        (
            [[a, b], [v(), v()], [a, v()]],
            "got shared ones: a:0 in towers [0, 2]. Make a new model",
        ),
        ([[v(2)], [a], [a]], "a:0 in towers [1, 2]"),
    ):
        with pytest.raises(ValueError) as caught:
            copy_to_replicas(lists)
        assert all(own in str(caught.value) for own in says)
        assert len(lists[0]) < 3 or "number 1" not in str(caught.value)
