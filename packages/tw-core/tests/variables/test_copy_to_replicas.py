"""Every tower's variables become equal to tower 0's, in both modes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core import copy_to_replicas
from tw_core.devices import canonical_device
from tw_core.testing import CPUS, NUM_CPUS, run_eagerly, run_in_function, run_in_graph

v1 = tf.compat.v1
DTYPES = [np.float32, np.float16, np.int64, np.bool_]


def make_lists(num_towers):
    """Makes [K][M] variables of several shapes and dtypes, one set a device."""
    lists = []
    for k in range(num_towers):
        with tf.device(CPUS[k]):
            lists.append(
                [
                    tf.Variable(np.full(shape, k + 1, dtype), name=f"v{m}")
                    for m, (shape, dtype) in enumerate(
                        zip([(), (3,), (2, 2), (1,)], DTYPES, strict=True)
                    )
                ]
            )
    return lists


@pytest.mark.parametrize("num_towers", [1, 2, 4])
@pytest.mark.parametrize("run", [run_in_graph, run_in_function, run_eagerly])
def test_all_towers_have_tower_0s_values(run, num_towers):
    lists = None

    def copy_and_read():
        nonlocal lists
        if lists is None or run is run_in_graph:
            lists = make_lists(num_towers)
        op = copy_to_replicas(lists)
        if run is run_in_graph:
            assert (op is None) == (num_towers == 1)
            if op is not None:
                # The initialisers run first, in a call of their own.
                with tf.control_dependencies([op]):
                    return [[v.read_value() for v in tower] for tower in lists]
        return [[v.read_value() for v in tower] for tower in lists]

    if run is run_in_function:
        lists = make_lists(num_towers)
    got = run(copy_and_read)
    want = [
        v.astype(d)
        for v, d in zip(
            [np.ones(()), np.ones(3), np.ones((2, 2)), np.ones(1)], DTYPES, strict=True
        )
    ]
    assert len(got) == num_towers
    for tower in got:
        for value, expected in zip(tower, want, strict=True):
            assert value.dtype == expected.dtype
            np.testing.assert_array_equal(value, expected)


def test_a_graph_gets_an_op_that_copies_each_time_it_runs(graph):
    lists = [[tf.Variable(1.0)], [tf.Variable(2.0)]]
    op = copy_to_replicas(lists)
    assert isinstance(op, tf.Operation)
    with v1.Session(config=v1.ConfigProto(device_count={"CPU": NUM_CPUS})) as sess:
        sess.run(v1.global_variables_initializer())
        assert sess.run(lists[1][0]) == 2.0
        sess.run(lists[0][0].assign(5.0))
        sess.run(op)
        assert sess.run([v for (v,) in lists]) == [5.0, 5.0]


def test_a_value_is_read_once_and_assigned_on_each_device(graph):
    lists = make_lists(4)
    before = len(graph.get_operations())
    copy_to_replicas(lists)
    made = graph.get_operations()[before:]
    reads = [op for op in made if op.type == "ReadVariableOp"]
    assigns = [op for op in made if op.type == "AssignVariableOp"]
    assert {canonical_device(op.device) for op in reads} == {"/device:CPU:0"}
    assert len(reads) == 4
    assert sorted({canonical_device(op.device)[-1] for op in assigns}) == [
        "1",
        "2",
        "3",
    ]


def test_keras_variables_are_copied():
    models = [keras.Sequential([keras.Input([3]), keras.layers.Dense(2)]) for _ in "ab"]
    copy_to_replicas([m.variables for m in models])
    for first, second in zip(*(m.get_weights() for m in models), strict=True):
        np.testing.assert_array_equal(first, second)


def test_no_variables_need_no_copying(graph):
    assert copy_to_replicas([[], []]).type == "NoOp"


# What is refused.


def v(*shape, dtype=np.float32, name="v"):
    return tf.Variable(np.zeros(shape, dtype), name=name)


def test_lists_of_different_lengths_are_refused_with_their_names():
    want = r"got \[2, 1\] of them in towers 0..1: \[\['a:0', 'b:0'\], \['a:0'\]\]"
    with pytest.raises(ValueError, match=want):
        copy_to_replicas([[v(name="a"), v(name="b")], [v(name="a")]])


def test_every_difference_in_shape_and_dtype_is_named():
    first = [v(2, name="a"), v(2, name="b"), v(2, name="c")]
    second = [v(3, name="a"), v(2, name="b"), v(2, dtype=np.float64, name="c")]
    with pytest.raises(ValueError) as error:
        copy_to_replicas([first, second])
    message = str(error.value)
    assert (
        "number 0: [('a:0', '(2,)', 'float32'), ('a:0', '(3,)', 'float32')]" in message
    )
    assert (
        "number 2: [('c:0', '(2,)', 'float32'), ('c:0', '(2,)', 'float64')]" in message
    )
    assert "number 1" not in message


def test_a_variable_in_two_towers_is_refused_by_name():
    shared, own = v(name="shared"), v(name="own")
    want = r"got the same one for shared:0 in towers \[0, 2\]. Make a new model"
    with pytest.raises(ValueError, match=want):
        copy_to_replicas([[shared, own], [v(), v()], [shared, v()]])


def test_a_variable_in_two_later_towers_is_refused_too():
    shared = v(name="shared")
    with pytest.raises(ValueError, match=r"shared:0 in towers \[1, 2\]"):
        copy_to_replicas([[v()], [shared], [shared]])


def test_what_is_no_variable_is_refused_by_its_place():
    want = "got tower 0 number 1: EagerTensor, tower 1 number 0: float"
    with pytest.raises(TypeError, match=want):
        copy_to_replicas([[v(), tf.constant(0.0)], [1.0, v()]])


def test_reference_variables_are_refused(graph, reference_variables):
    lists = [[v1.get_variable(name, [1])] for name in "ab"]
    with pytest.raises(ValueError, match=r"a:0 is a reference .*b:0 is"):
        copy_to_replicas(lists)
