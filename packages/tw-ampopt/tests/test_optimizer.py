"""The drop-in's own surface: registration, sharing, the protocol, and refusals."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tw_ampopt import (
    DynamicLossScale,
    Optimizer,
    SimpleAdam,
    StaticLossScale,
)
from tw_core import OptimizerLike
from tw_core.testing import CPUS
from tw_core.variables import override_to_local_variable

v1 = tf.compat.v1
SGD = {"tf_optimizer": "tf.train.GradientDescentOptimizer", "learning_rate": 1.0}


@pytest.fixture
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def session(graph):
    config = v1.ConfigProto(device_count={"CPU": 8})
    sess = v1.Session(graph=graph, config=config)
    sess.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
    return sess


def variable_on(device, value=(1.0, 2.0), name="w"):
    with tf.device(device):
        return tf.Variable(np.float32(value), name=name)


def square_loss(variable):
    with tf.device(variable.device):
        return 0.5 * tf.reduce_sum(tf.square(variable))


def test_the_arguments_are_the_older_systems_in_their_order(graph):
    optimizer = Optimizer(
        *("G/main", "tf.train.AdamOptimizer", 0.002, 4, None, True, 10.0, 0.5, 2.0),
        *(True,),
        beta1=0.0,
    )
    assert (optimizer.name, optimizer.id) == ("G/main", "G.main")
    assert [Optimizer("G/main").scope, optimizer.scope] == ["G.main_1", "G.main"]
    assert optimizer.optimizer_class is v1.train.AdamOptimizer
    assert optimizer.optimizer_kwargs == {"beta1": 0.0}
    assert optimizer.minibatch_multiplier == 4
    assert optimizer.get_loss_scaling_var("/cpu:0").dtype == tf.float32
    assert optimizer.report_mem_usage


def test_a_variables_gradients_are_averaged_over_the_calls_that_list_it(graph):
    optimizer = Optimizer(**SGD)
    w, b = variable_on("/cpu:0"), variable_on("/cpu:0", name="b")
    with tf.device("/cpu:0"):
        for factor in (2.0, 4.0):
            optimizer.register_gradients(tf.reduce_sum(w) * factor, [w, b])
        optimizer.register_gradients(tf.reduce_sum(b) * 6.0, {"w": w, "b": b})
        optimizer.register_gradients(tf.reduce_sum(b) * 9.0, [b])
    step = optimizer.apply_updates()
    with session(graph) as sess:
        sess.run(step)
        np.testing.assert_array_equal(sess.run(w), np.float32([1, 2]) - 2)
        np.testing.assert_array_equal(sess.run(b), np.float32([1, 2]) - 3.75)


def test_sparse_gradients_of_several_calls_are_averaged(graph):
    optimizer = Optimizer(**SGD)
    w = variable_on("/cpu:0", np.zeros((3, 1)))
    with tf.device("/cpu:0"):
        for row in (0, 2, 2, 2):
            optimizer.register_gradients(tf.reduce_sum(tf.gather(w, [row])), [w])
    step = optimizer.apply_updates()
    with session(graph) as sess:
        sess.run(step)
        np.testing.assert_array_equal(sess.run(w)[:, 0], [-0.25, 0, -0.75])


def test_the_scale_can_be_asked_for_before_anything_is_registered(graph):
    optimizer = Optimizer(loss_scale=StaticLossScale(3))
    variable = optimizer.get_loss_scaling_var("/cpu:1")
    assert variable.dtype == tf.int64
    assert optimizer.get_loss_scaling_var("/cpu:2") is variable
    with tf.device("/cpu:2"):
        value, half = tf.constant(5.0), tf.constant(2.0, tf.float16)
    there = optimizer.apply_loss_scaling(value)
    back = optimizer.undo_loss_scaling(there)
    scaled = optimizer.apply_loss_scaling(half)
    assert scaled.dtype == tf.float16
    with session(graph) as sess:
        assert sess.run([variable, there, back, scaled]) == [3, 40.0, 5.0, 16.0]
    plain = Optimizer()
    assert plain.apply_loss_scaling(value) is value is plain.undo_loss_scaling(value)
    assert plain.get_loss_scaling_var("/cpu:0") is None


def shared_pair(graph, **settings):
    arguments = {"loss_scale": DynamicLossScale(growth_interval=2), **settings}
    main = Optimizer("Main", minibatch_multiplier=2, **arguments)
    regular = Optimizer("Reg", share=main, **arguments)
    w = variable_on("/cpu:0")
    grad = v1.placeholder_with_default(tf.ones(2), [2])
    for optimizer in (main, regular):
        with tf.device("/cpu:0"):
            optimizer.register_gradients(tf.reduce_sum(w * grad), [w])
    return main, regular, w, grad, main.apply_updates(), regular.apply_updates()


def test_sharing_is_of_slots_scale_and_counts_but_not_of_accumulators(graph):
    main, regular, w, grad, main_step, regular_step = shared_pair(
        graph,
        tf_optimizer="tf.train.MomentumOptimizer",
        momentum=0.5,
        learning_rate=1.0,
    )
    shared = {v.name for v in main.variables()} & {v.name for v in regular.variables()}
    assert shared == {
        "Main/loss_scaling_var:0",
        "Main/good_steps:0",
        "Main/updates:0",
        "Main/skipped_updates:0",
        "w/Main_opt0:0",
    }
    with session(graph) as sess:
        sess.run(main_step)  # half a group
        sess.run(regular_step)  # momentum 1
        sess.run(main_step)  # momentum 1.5
        np.testing.assert_array_equal(sess.run(w), np.float32([1, 2]) - 2.5)
        assert sess.run(main.get_loss_scaling_var("/cpu:0")) == 16
        sess.run(regular_step, {grad: [np.inf, 0]})
        assert sess.run(main.get_loss_scaling_var("/cpu:0")) == 15
        statistics = sess.run(main.statistics())
        assert (statistics["updates"], statistics["skipped_updates"]) == (2, 1)


def test_a_scale_that_changes_between_micro_batches_does_not_spoil_the_mean(graph):
    _, _, w, grad, main_step, regular_step = shared_pair(graph, **SGD)
    with session(graph) as sess:
        sess.run(main_step, {grad: [2, 0]})
        sess.run(regular_step, {grad: [np.nan, 0]})  # halves the scale
        sess.run(main_step, {grad: [4, 0]})
        np.testing.assert_array_equal(sess.run(w), [1 - 3, 2])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"tf_optimizer": SimpleAdam}, "tf_optimizer"),
        ({"learning_rate": 0.5}, "learning_rate 0.5 here, 0.001 there"),
        ({"beta1": 0.5}, "arguments"),
        ({"use_loss_scaling": True}, "loss_scale"),
        ({"master_copies": True}, "master_copies True here, False there"),
    ],
)
def test_sharing_between_different_optimizers_is_refused(graph, arguments, named):
    with pytest.raises(
        ValueError, match="share must be an optimizer with the same"
    ) as error:
        Optimizer("B", share=Optimizer("A"), **arguments)
    assert named in str(error.value)


def test_what_needs_an_update_state_or_a_session_says_so(graph):
    main = Optimizer("A", **SGD)
    other = Optimizer("B", share=main, **SGD)
    for method in ("statistics", "nonfinite_gradients", "copy_to_replicas"):
        with pytest.raises(RuntimeError, match=r"^Nothing updates yet; call apply"):
            getattr(main, method)()
    w = variable_on("/cpu:0")
    other.apply_gradients(other.compute_gradients(square_loss(w), [w]))
    with pytest.raises(RuntimeError, match=r"^There is no state yet; call"):
        main.reset_op  # noqa: B018
    with pytest.raises(RuntimeError, match="There is no default session"):
        main.reset_optimizer_state()


@pytest.mark.parametrize(
    ("resets", "mine", "sharers"), [(0, "w", "wb"), (1, "wb", "w"), (1, "w", "b")]
)
def test_a_reset_by_either_sharer_resets_the_slots_of_both(
    graph, resets, mine, sharers
):
    main = Optimizer("A", learning_rate=0.5)
    both = [main, Optimizer("B", learning_rate=0.5, share=main)]
    variables = {name: variable_on("/cpu:0", name=name) for name in "wb"}
    steps = []
    for optimizer, names in zip(both, (mine, sharers), strict=True):
        own = [variables[name] for name in names]
        pairs = optimizer.compute_gradients(tf.add_n(map(square_loss, own)), own)
        steps.append(optimizer.apply_gradients(pairs))
    slots = [main.get_slot(variables[name], slot) for name in "wb" for slot in "mv"]
    shared = [v for v in main.variables() if "global_norm" not in v.name]
    with session(graph) as sess:
        graph.finalize()
        start = sess.run(shared)
        for step in steps:
            sess.run(step)
        assert all(value.all() for value in sess.run(slots))
        with sess.as_default():
            both[resets].reset_optimizer_state()
        for got, want in zip(sess.run(shared), start, strict=True):
            np.testing.assert_array_equal(got, want)


# Bad input.


def test_outside_of_a_graph_it_is_refused():
    message = r"got {}\. .*tw_ampopt\.TowerOptimizer with tf.function"
    with pytest.raises(RuntimeError, match=message.format("eager mode")):
        Optimizer()
    for build in (lambda f: tf.function(f)(), lambda f: v1.wrap_function(f, [])):
        with pytest.raises(RuntimeError, match=message.format(r"a tf\.function")):
            build(lambda: Optimizer())


def test_a_variable_on_another_device_than_the_loss_is_refused(graph):
    w = variable_on("/cpu:1", name="far")
    with tf.device("/cpu:0"):
        loss = tf.reduce_sum(w, name="near")
    with pytest.raises(
        ValueError, match=r"near:0' is on '/device:CPU:0', but far:0 on"
    ) as e:
        Optimizer().register_gradients(loss, [w])
    assert "CPU:1" in str(e.value)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([{"odd": 2}, {"odd": 3}], r"(?s)odd, of shape \(2,\).*/device:CPU:1"),
        ([{"w": 2, "extra": 2}, {"w": 2}], "extra"),
    ],
)
def test_different_variables_on_the_devices_are_refused(graph, sizes, message):
    optimizer = Optimizer()
    for k, own in enumerate(sizes):
        made = [variable_on(f"/cpu:{k}", np.ones(own[n]), n) for n in own]
        with tf.device(f"/cpu:{k}"):
            loss = tf.add_n(list(map(square_loss, made)))
        optimizer.register_gradients(loss, made)
    with pytest.raises(ValueError, match=message):
        optimizer.apply_updates()


def test_losses_that_reach_no_variable_are_refused_unless_allowed(graph):
    assert Optimizer().apply_updates(allow_no_op=True).name.endswith("TrainingOp")
    for allow in (False, True):
        optimizer = Optimizer()
        w = variable_on("/cpu:0", name="idle")
        with tf.device("/cpu:0"):
            optimizer.register_gradients(tf.constant(1.0), [w])
        if allow:
            assert optimizer.apply_updates(allow_no_op=True).type == "NoOp"
        else:
            with pytest.raises(ValueError, match=r"depends on any of its variables"):
                optimizer.apply_updates()


def test_applying_twice_and_registering_late_are_refused(graph):
    optimizer = Optimizer("T")
    w = variable_on("/cpu:0")
    optimizer.register_gradients(square_loss(w), [w])
    optimizer.apply_updates()
    with pytest.raises(RuntimeError, match=r"^apply_updates has already been called"):
        optimizer.apply_updates()
    with pytest.raises(RuntimeError, match="was called after apply_updates"):
        optimizer.register_gradients(square_loss(w), [w])


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda **_: object(), r"Cannot wrap builtins.object; can wrap .*Keras 3"),
        (tf_keras.optimizers.Adam, r"Cannot wrap tf_keras.*legacy"),
        (
            lambda learning_rate: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD()
            ),
            "scales the loss itself",
        ),
        (
            lambda learning_rate: keras.optimizers.SGD(gradient_accumulation_steps=2),
            "accumulates itself; use the accumulation of tw_ampopt",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_wrapped_is_refused(graph, made, message):
    optimizer = Optimizer(tf_optimizer=made)
    w = variable_on("/cpu:0")
    optimizer.register_gradients(square_loss(w), [w])
    with pytest.raises(TypeError, match=message):
        optimizer.apply_updates()


def test_a_reference_variable_is_refused(graph):
    w = v1.Variable([1.0, 2.0], use_resource=False)
    with pytest.raises(TypeError, match="enable_resource_variables"):
        Optimizer().register_gradients(tf.reduce_sum(w), [w])


def test_a_slot_for_variables_that_keras_does_not_know_is_refused(graph):
    main = Optimizer("A", tf_optimizer=keras.optimizers.SGD)
    other = Optimizer("B", tf_optimizer=keras.optimizers.SGD, share=main)
    w, b = variable_on("/cpu:0", name="known"), variable_on("/cpu:0", name="new")
    main.register_gradients(square_loss(w), [w])
    main.apply_updates()
    other.register_gradients(square_loss(b), [b])
    with pytest.raises(ValueError, match=r"slots for \['known:0'\] and cannot add any"):
        other.apply_updates()


# Which gradients were not finite.


def test_variables_with_bad_gradients_are_named_per_tower(graph):
    optimizer = Optimizer(**SGD)
    feeds = []
    for k in range(2):
        w, b = variable_on(CPUS[k], name="w"), variable_on(CPUS[k], name="b")
        with tf.device(CPUS[k]):
            feeds.append(v1.placeholder(tf.float32, [2]))
            loss = tf.reduce_sum(w) + tf.reduce_sum(b * feeds[k])
        optimizer.register_gradients(loss, [w, b])
    step = optimizer.apply_updates()
    flags = optimizer.nonfinite_gradients()
    assert optimizer.nonfinite_gradients() is flags
    with session(graph) as sess:
        got = sess.run([step, flags], {feeds[0]: [1, 1], feeds[1]: [np.inf, 1]})[1]
    np.testing.assert_array_equal(got, [[False, False], [False, True]])
    assert optimizer.nonfinite_names(got) == [[], ["b_1:0"]]


# The optimizer protocol.


@pytest.mark.parametrize("multiplier", [None, 2])
def test_by_the_protocol_gradients_come_unscaled_and_updates_count_steps(
    graph, multiplier
):
    optimizer = Optimizer(
        loss_scale=StaticLossScale(10), minibatch_multiplier=multiplier, **SGD
    )
    w, idle = variable_on("/cpu:0"), variable_on("/cpu:0", name="idle")
    global_step = v1.train.get_or_create_global_step()
    x = v1.placeholder(tf.float32, [])
    pairs = optimizer.compute_gradients(square_loss(w) * x, [w, idle])
    assert isinstance(optimizer, OptimizerLike)
    assert pairs[0][1] is w
    assert pairs[1][0] is None
    step = optimizer.apply_gradients(pairs, global_step=global_step, name="go")
    with session(graph) as sess:
        np.testing.assert_array_equal(sess.run(pairs[0][0], {x: 1.0}), [1, 2])
        steps = []
        for value in (1.0, 1.0, np.inf, 1.0, 0.5, 0.5):
            sess.run(step, {x: value})
            steps.append(int(sess.run(global_step)))
        assert steps == (
            [1, 2, 2, 3, 4, 5] if multiplier is None else [0, 1, 1, 1, 1, 2]
        )


def test_a_replica_made_of_local_variables_has_local_state_of_the_same_names(graph):
    optimizers = []
    for k in range(2):
        with (
            override_to_local_variable(k > 0),
            tf.device(CPUS[k]),
            tf.name_scope(f"tower{k}/"),
        ):
            w = tf.Variable([1.0, 2.0], name="w")
            optimizer = Optimizer(
                loss_scale=DynamicLossScale(),
                minibatch_multiplier=2,
                master_copies=True,
            )
        optimizer.apply_gradients(optimizer.compute_gradients(square_loss(w), [w]))
        optimizers.append(optimizer)
    names = [[v.name for v in optimizer.variables()] for optimizer in optimizers]
    assert len(names[0]) == 12
    assert [re.sub("^tower1/", "tower0/", name) for name in names[1]] == names[0]
    assert not set(names[1]) & {v.name for v in v1.global_variables()}
    assert set(names[1]) <= {v.name for v in v1.local_variables()}
    assert set(names[0]) <= {v.name for v in v1.global_variables()}


def test_simple_adam_counts_steps_on_its_own(graph):
    w, global_step = variable_on("/cpu:0"), v1.train.get_or_create_global_step()
    adam = SimpleAdam(learning_rate=0.5)
    step = adam.apply_gradients(
        adam.compute_gradients(square_loss(w), None), global_step=global_step
    )
    with pytest.raises(ValueError, match=r"^No gradient .* \['w:0'\]"):
        adam.apply_gradients(adam.compute_gradients(tf.constant(1.0), [w]))
    with session(graph) as sess:
        sess.run(step)
        assert sess.run(global_step) == 1
        np.testing.assert_allclose(sess.run(w), [0.5, 1.5], rtol=1e-5)
