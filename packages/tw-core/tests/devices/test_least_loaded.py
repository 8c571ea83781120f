"""Variables go to the device with the fewest bytes, all else to the worker's."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core import LeastLoadedDeviceSetter
from tw_core.devices import canonical_device
from tw_core.testing import NUM_CPUS

v1 = tf.compat.v1
PS = ["/cpu:1", "/cpu:2"]


def setter(ps_devices=PS):
    return LeastLoadedDeviceSetter("/cpu:0", ps_devices)


def devices(variables):
    return [canonical_device(v.device)[-1] for v in variables]


def test_variables_are_balanced_by_bytes_and_other_ops_go_to_the_worker(graph):
    place, free = setter(), LeastLoadedDeviceSetter("", PS)
    assert str(place) == "LeastLoadedDeviceSetter-/device:CPU:0"
    with v1.device(place):
        made = [
            v1.get_variable("a", [100]),  # 400 bytes
            v1.get_variable("b", [60], tf.float64),  # 480 bytes
            v1.Variable([1.0] * 10),
            tf.Variable([1.0] * 10),
            v1.get_variable("e", []),
            v1.get_variable("half", [5], tf.bfloat16),
            v1.get_variable("flags", [2, 3], tf.bool),
            v1.get_variable("none", [0, 3]),
        ]
        y = made[0] * 2.0
    assert devices([*made, y]) == [*"12111211", "0"]
    assert place.bytes_on == [400 + 40 + 40 + 4 + 6, 480 + 10]
    with v1.device(free):  # without a device for them
        w = v1.get_variable("w", [2])
        assert (w * 2.0).device == ""
    assert devices([w]) == ["1"]


def test_an_op_with_a_device_keeps_it_and_a_pinned_variable_is_counted(graph):
    place = setter()
    with v1.device(place):
        with tf.device("/cpu:2"):
            pinned = v1.get_variable("pinned", [100])
            y = pinned + 1.0
        with tf.device("/cpu:5"):
            elsewhere = v1.get_variable("elsewhere", [100])
        free = [v1.get_variable(f"free{i}", [40]) for i in range(3)]
    assert canonical_device(y.device) == "/device:CPU:2"
    assert devices([pinned, elsewhere, *free]) == ["2", "5", "1", "1", "1"]
    assert place.bytes_on == [480, 400]


def test_an_optimizers_slots_are_counted_where_their_variables_are(graph):
    # TensorFlow asks about a slot, and then moves it to its variable's device.
    place = setter()
    with v1.device(place):
        big = v1.get_variable("big", [100])
        small = v1.get_variable("small", [1])
        optimizer = v1.train.AdamOptimizer()
        optimizer.apply_gradients([(tf.ones([100]), big), (tf.ones([1]), small)])
    assert (
        devices([optimizer.get_slot(big, "m"), optimizer.get_slot(big, "v")])
        == ["1"] * 2
    )
    assert sum(place.bytes_on) == sum(
        4 * v.shape.num_elements() for v in v1.global_variables()
    )
    assert place.bytes_on[0] >= 3 * 400


@pytest.mark.parametrize(
    "read",
    [lambda w: w.read_value(), lambda w: tf.gather(w, [0]), lambda w: w.assign([2.0])],
)
def test_an_op_that_uses_a_variable_is_placed_where_it_is(graph, read):
    with v1.device(setter()):
        v1.get_variable("first", [2])
        read(v1.get_variable("w", [1]))
    ops = [op for op in graph.get_operations() if op.inputs]
    users = [op for op in ops if op.inputs[0].op.name == "w" and op.name != "w/Assign"]
    assert len(users) >= 2
    assert {op.device for op in users} == {"/device:CPU:2"}


def test_the_gradient_of_a_gather_may_be_colocated_with_it(graph):
    # A session without soft placement refuses a group with two devices.
    with v1.device(setter()):
        w = v1.get_variable("w", [5, 2], initializer=v1.ones_initializer())
        loss = tf.reduce_sum(tf.gather(w, [1, 2]) ** 2)
        grad = v1.gradients(loss, w, colocate_gradients_with_ops=True)[0]
    config = v1.ConfigProto(device_count={"CPU": NUM_CPUS}, allow_soft_placement=False)
    with v1.Session(config=config) as sess:
        sess.run(w.initializer)
        np.testing.assert_array_equal(sess.run(grad.values), [[2, 2], [2, 2]])


def test_conditions_loops_and_their_bodies_stay_on_the_worker(graph):
    seen = []

    def body(x):
        y = x + 1.0
        seen.append(canonical_device(y.device))
        return y

    with v1.device(setter()):
        w = v1.get_variable("w", [])
        maybe = tf.less(tf.random.uniform([]), 0.5)
        tf.cond(maybe, lambda: body(w), lambda: v1.get_variable("inside", []) + 0.0)
        tf.while_loop(lambda y: y < 3.0, lambda y: [body(y)], [w.read_value()])
    (condition,) = [op for op in graph.get_operations() if op.type == "If"]
    assert w.handle in condition.inputs
    assert {*seen, canonical_device(condition.device)} == {"/device:CPU:0"}
    assert devices([w, v1.global_variables()[-1]]) == ["1", "2"]


@pytest.mark.parametrize(
    ("shape", "num_bytes"), [([None, 3], 12), ([None, None], 4), (None, 4)]
)
def test_a_shape_that_is_not_fully_known_is_counted_and_said(
    graph, shape, num_bytes, caplog
):
    place = setter()
    with v1.device(place):
        tf.Variable(tf.ones([2, 3]), shape=tf.TensorShape(shape), name="v")
        value = v1.placeholder(tf.float64, None)
        v1.get_variable("w", initializer=value, validate_shape=False)
    assert place.bytes_on == [num_bytes, 8]
    for name, size in {"v": num_bytes, "w": 8}.items():
        [said] = [m for m in caplog.messages if f"variable {name} has the shape" in m]
        assert f"counted as {size} bytes" in said


# As a variable creator.


def test_as_a_creator_it_places_the_variables_of_modules_and_keras_models():
    place = setter()
    with tf.variable_creator_scope(place.create):
        made = [tf.Variable(tf.ones([n])) for n in (100, 60, 10, 40)]
    assert devices(made) == ["1", "2", "2", "2"]
    assert place.bytes_on == [400, 440]
    place = setter()
    with tf.variable_creator_scope(place.create):
        layers = [keras.layers.Dense(4), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input([8]), *layers])
    assert devices(v.value for v in model.variables) == ["1", "2", "2", "2"]
    assert place.bytes_on == [4 * 32, 4 * (4 + 4 + 1)]


def test_something_as_large_as_a_variable_is_balanced_too(graph):
    place = setter()
    w = v1.get_variable("w", [100])
    sums = tf.zeros([30], tf.float64)
    chosen = [place.place_with_balance(op) for op in (w.op, sums.op, sums.op)]
    assert chosen == [canonical_device(PS[i]) for i in (0, 1, 1)]
    assert place.ps_sizes == place.bytes_on == [400, 480]
    with pytest.raises(TypeError, match=r" an output; got"):
        place.place_with_balance(tf.no_op())
