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


def test_variables_are_balanced_by_bytes(graph):
    place = setter()
    with v1.device(place):
        made = [
            v1.get_variable("a", [100]),  # 400 bytes
            v1.get_variable("b", [60], tf.float64),  # 480 bytes
            v1.get_variable("c", [10]),
            v1.get_variable("d", [10]),
            v1.get_variable("e", []),
        ]
    assert devices(made) == ["1", "2", "1", "1", "1"]
    assert place.bytes_on == [400 + 40 + 40 + 4, 480]


@pytest.mark.parametrize(
    "make",
    [
        lambda: v1.get_variable("v", [2]),
        lambda: v1.Variable([1.0, 2.0]),
        lambda: tf.Variable([1.0, 2.0]),
    ],
)
def test_every_way_to_make_a_variable_counts(graph, make):
    place = setter()
    with v1.device(place):
        assert devices([make()]) == ["1"]
    assert place.bytes_on == [8, 0]


def test_other_ops_go_to_the_worker(graph):
    with v1.device(setter()):
        w = v1.get_variable("w", [2])
        y = w * 2.0
    assert canonical_device(y.device) == "/device:CPU:0"


def test_without_a_worker_device_other_ops_stay_free(graph):
    with v1.device(LeastLoadedDeviceSetter("", PS)):
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


def test_a_condition_that_reads_a_variable_stays_on_the_worker(graph):
    with v1.device(setter()):
        w = v1.get_variable("w", [])
        maybe = tf.less(tf.random.uniform([]), 0.5)
        tf.cond(maybe, lambda: w + 1.0, lambda: w - 1.0)
    (condition,) = [op for op in graph.get_operations() if op.type == "If"]
    assert w.handle in condition.inputs
    assert canonical_device(condition.device) == "/device:CPU:0"


def test_the_bodies_of_conditions_and_loops_are_placed_on_the_worker(graph):
    seen = []

    def body(x):
        y = x + 1.0
        seen.append(canonical_device(y.device))
        return y

    with v1.device(setter()):
        x = v1.get_variable("x", [])
        maybe = tf.less(tf.random.uniform([]), 0.5)
        tf.cond(maybe, lambda: body(x), lambda: body(x))
        tf.while_loop(lambda y: y < 3.0, lambda y: [body(y)], [x.read_value()])
    assert set(seen) == {"/device:CPU:0"}
    assert len(seen) >= 3


def test_a_variable_made_in_a_body_is_placed_too(graph):
    place = setter()
    with v1.device(place):
        first = v1.get_variable("first", [2])
        maybe = tf.less(tf.random.uniform([]), 0.5)
        tf.cond(maybe, lambda: v1.get_variable("w", [2]) + 0.0, lambda: tf.zeros([2]))
    assert devices([first, v1.global_variables()[-1]]) == ["1", "2"]


@pytest.mark.parametrize(
    ("shape", "num_bytes"), [([None, 3], 12), (None, 4), ([None, None], 4)]
)
def test_a_shape_that_is_not_fully_known_is_counted_and_said(
    graph, shape, num_bytes, caplog
):
    place = setter()
    with v1.device(place):
        tf.Variable(tf.ones([2, 3]), shape=tf.TensorShape(shape), name="v")
    assert place.bytes_on == [num_bytes, 0]
    assert any("variable v has the shape" in message for message in caplog.messages)


def test_a_variable_that_starts_with_a_tensor_of_unknown_shape_is_said(graph, caplog):
    place = setter()
    with v1.device(place):
        value = v1.placeholder(tf.float64, None)
        v1.get_variable("v", initializer=value, validate_shape=False)
    assert place.bytes_on == [8, 0]
    assert any("variable v has the shape" in message for message in caplog.messages)


def test_the_graph_runs_with_its_variables_where_they_were_put(graph):
    with v1.device(setter()):
        w = v1.get_variable("w", [3], initializer=v1.ones_initializer())
        update = v1.assign_add(w, [1.0, 2.0, 3.0])
    config = v1.ConfigProto(device_count={"CPU": NUM_CPUS})
    with v1.Session(config=config) as sess:
        sess.run(w.initializer)
        np.testing.assert_array_equal(sess.run(update), [2.0, 3.0, 4.0])


# As a variable creator.


def test_as_a_creator_it_places_the_variables_of_a_module():
    place = setter()
    with tf.variable_creator_scope(place.create):
        made = [tf.Variable(tf.ones([n])) for n in (100, 60, 10, 40)]
    assert devices(made) == ["1", "2", "2", "2"]
    assert place.bytes_on == [400, 440]


def test_as_a_creator_it_places_the_variables_of_a_keras_model():
    place = setter()
    with tf.variable_creator_scope(place.create):
        model = keras.Sequential(
            [keras.Input([8]), keras.layers.Dense(4), keras.layers.Dense(1)]
        )
    assert devices(v.value for v in model.variables) == ["1", "2", "2", "2"]
    assert place.bytes_on == [4 * 32, 4 * (4 + 4 + 1)]


# What is refused.


@pytest.mark.parametrize(("worker", "ps"), [("no", PS), ("/cpu:0", ["/cpu:0", "no"])])
def test_what_is_no_device_is_refused(worker, ps):
    with pytest.raises(ValueError, match="'no' is not a TensorFlow device string"):
        LeastLoadedDeviceSetter(worker, ps)


def test_a_reference_variable_is_refused(graph, reference_variables):
    want = "w is a reference variable; only resource variables"
    with pytest.raises(ValueError, match=want), v1.device(setter()):
        v1.get_variable("w", [2])


def test_it_shows_its_worker():
    assert str(setter()) == "LeastLoadedDeviceSetter-/device:CPU:0"


def test_something_as_large_as_a_variable_is_balanced_too(graph):
    place = setter()
    w = v1.get_variable("w", [100])
    sums = tf.zeros([30], tf.float64)
    chosen = [place.place_with_balance(op) for op in (w.op, sums.op, sums.op)]
    assert chosen == [canonical_device(PS[i]) for i in (0, 1, 1)]
    assert place.ps_sizes == place.bytes_on == [400, 480]


def test_balancing_wants_an_output(graph):
    with pytest.raises(TypeError, match=r" an output; got"):
        setter().place_with_balance(tf.no_op())


def test_balancing_refuses_reference_variables(graph):
    w = v1.Variable([1.0], use_resource=False, name="w")
    with pytest.raises(ValueError, match=r"^w is a reference var"):
        setter().place_with_balance(w.op)
