"""A graph takes several builds, and stays usable after one that failed."""

import functools
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from session_builders import REPEATABLE, build, new_session, pairs_of

from tw_builders import DataParallelBuilder, SyncMultiGPUReplicatedBuilder
from tw_core import get_current_tower_context
from tw_core.testing import CPUS
from tw_core.variables import variable_origin

v1 = tf.compat.v1
KEYS = v1.GraphKeys
TWO = list(CPUS[:2])
BUILDERS = REPEATABLE | {
    "replicated, collective": partial(
        SyncMultiGPUReplicatedBuilder, average=True, mode="collective"
    ),
}
OPTIMIZERS = {
    "momentum": partial(v1.train.MomentumOptimizer, 0.25, 0.5),
    "adam": partial(v1.train.AdamOptimizer, 0.25),
}
each_builder = pytest.mark.parametrize("builder", BUILDERS)
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def tower_fn(*names, start=5.0):
    """Makes a tower function of a small and a large variable for each name."""

    def tower():
        made = [
            v1.get_variable(
                f"{name}/{size}",
                size,
                initializer=v1.constant_initializer(start),
                regularizer=lambda w: 0.5 * tf.reduce_sum(w),
            )
            for name in names
            for size in (3, 17_000)
        ]
        return pairs_of(tf.add_n([tf.reduce_sum((w - 1.0) ** 2) for w in made]), made)

    return tower


def build_on_two(builder, tower, optimizer="momentum"):
    return build(BUILDERS[builder](TWO), tower, OPTIMIZERS[optimizer])[:2]


def train(session, grads, op, steps=3):
    """Returns the variables of all towers after some steps."""
    for _ in range(steps):
        session.run(op)
    return session.run([v for own in grads for _, v in own])


@functools.cache
def alone(builder, names, start, optimizer):
    """Trains variables of these names in a graph of their own."""
    with tf.Graph().as_default():
        grads, op = build_on_two(builder, tower_fn(*names, start=start), optimizer)
        with new_session() as session:
            return train(session, grads, op)


def expect_equal(got, want):
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@each_builder
@each_optimizer
def test_two_builds_train_as_each_does_alone(builder, optimizer):
    models = [(("a",), 5.0), (("b", "c"), -1.0)]
    with tf.Graph().as_default():
        builds = [
            build_on_two(builder, tower_fn(*names, start=start), optimizer)
            for names, start in models
        ]
        with new_session() as session:
            for (names, start), (grads, op) in zip(models, builds, strict=True):
                want = alone(builder, names, start, optimizer)
                expect_equal(train(session, grads, op), want)


def test_the_sync_op_of_a_build_that_waits_for_another_does_not_train_it():
    with tf.Graph().as_default():
        grads, op = build_on_two("replicated", tower_fn("generator"))
        builder = SyncMultiGPUReplicatedBuilder(TWO)
        with tf.control_dependencies([op]):
            others = builder.call_for_each_tower(tower_fn("discriminator"))
            _, sync_op = builder.build(others, OPTIMIZERS["momentum"])
        with new_session() as session:
            session.run(sync_op)
            values = session.run([v for own in grads for _, v in own])
    assert all((value == 5.0).all() for value in values)


def test_ops_of_a_further_build_are_in_scopes_of_one_number():
    seen = []

    def tower():
        context = get_current_tower_context()
        seen.append((context.ns_name, context.vs_name, context.index))
        return tf.constant(1.0).op.name

    with tf.Graph().as_default(), tf.name_scope("outer"):
        two, three = (list(CPUS[:count]) for count in (2, 3))
        replicas = [False, True, True]
        DataParallelBuilder.call_for_each_tower(two, tower)
        names = DataParallelBuilder.call_for_each_tower(three, tower, use_vs=replicas)
    assert names == [f"tower{k}_1/Const" for k in range(3)]
    assert seen == [
        ("tower0", "", 0),
        ("tower1", "", 1),
        ("tower0_1", "", 0),
        ("tower1_1", "tower1", 1),
        ("tower2_1", "tower2", 2),
    ]


def test_a_scope_of_the_users_called_tower0_is_no_obstacle():
    with tf.Graph().as_default():
        with tf.name_scope("tower0"):
            tf.constant(0)
        grads, op = build_on_two("replicated", tower_fn("a"))
        with new_session() as session:
            train(session, grads, op)


@each_builder
def test_two_losses_of_one_model_train_as_a_gan_does(builder):
    """Two builds over the same variables, each with an optimizer of its own."""

    def tower(names, others):
        def fn():
            own = {n: v1.get_variable(n, initializer=[3.0]) for n in [*names, *others]}
            loss = tf.add_n([tf.reduce_sum(v**2) for v in own.values()])
            return pairs_of(loss, [own[name] for name in names])

        return fn

    with tf.Graph().as_default(), v1.variable_scope("", reuse=v1.AUTO_REUSE):
        _, generate = build_on_two(builder, tower(["g"], ["d"]), "momentum")
        grads, discriminate = build_on_two(builder, tower(["d"], ["g"]), "momentum")
        global_names = [v.name for v in v1.global_variables()]
        assert sorted(global_names) == ["d/Momentum:0", "d:0", "g/Momentum:0", "g:0"]
        with new_session() as session:
            session.run(generate)
            [d, *_] = session.run([v for own in grads for _, v in own])
            np.testing.assert_array_equal(d, [3.0])
            session.run(discriminate)
            values = session.run([v for own in grads for _, v in own])
    for value in values:
        np.testing.assert_array_equal(value, [3.0 - 0.25 * 2.0 * 3.0])


def test_a_cell_that_runs_twice_is_told_what_to_do_and_trains_then():
    with tf.Graph().as_default():
        build_on_two("replicated", tower_fn("a"), "adam")
        with pytest.raises(
            ValueError, match=r"Variable a/3 already exists.*AUTO_REUSE"
        ):
            build_on_two("replicated", tower_fn("a"), "adam")
        with v1.variable_scope("", reuse=v1.AUTO_REUSE):
            grads, op = build_on_two("replicated", tower_fn("a"), "adam")
        assert [v.name for v in v1.trainable_variables()] == [
            f"{tower}a/{size}:0" for tower in ("", "tower1/") for size in (3, 17_000)
        ]
        with new_session() as session:
            got = train(session, grads, op)
    expect_equal(got, alone("replicated", ("a",), 5.0, "adam"))


# After a failure.


def failing_in(index, tower):
    """Builds ``tower``, leaves something in every collection, and fails in a tower."""

    def fn():
        pairs = tower()
        tf.Variable(1.0, name="plain", trainable=get_current_tower_context().index == 0)
        v1.add_to_collection(KEYS.UPDATE_OPS, tf.no_op())
        v1.summary.scalar("loss", 1.0)
        v1.losses.add_loss(tf.constant(1.0))
        if get_current_tower_context().index == index:
            raise KeyError("boom")
        return pairs

    return fn


def contents(graph):
    keys = graph.get_all_collection_keys()
    found = {key: graph.get_collection(key) for key in keys}
    return {key: list(map(id, items)) for key, items in found.items() if items}


@each_builder
@pytest.mark.parametrize("index", [0, 1])
def test_the_same_build_works_after_a_failure(builder, index):
    index = 0 if builder == "asynchronous" else index
    with tf.Graph().as_default() as graph:
        build_on_two(builder, tower_fn("before"), "adam")
        before = contents(graph)
        with pytest.raises(KeyError, match="boom"):
            build_on_two(builder, failing_in(index, tower_fn("a", start=2.0)), "adam")
        assert contents(graph) == before
        # With other initial values, which somebody has changed meanwhile.
        grads, op = build_on_two(builder, tower_fn("a"), "adam")
        names = [v.name for v in v1.trainable_variables()]
        assert names.count("a/3:0") == 1
        losses = v1.get_collection(KEYS.REGULARIZATION_LOSSES)
        assert len([loss for loss in losses if loss.name.startswith("a/3/")]) == 1
        with new_session() as session:
            want = alone(builder, ("a",), 5.0, "adam")
            expect_equal(train(session, grads, op), want)


def test_replicas_and_the_global_step_are_found_after_failures():
    def tower():
        v1.train.get_or_create_global_step()
        tf.Variable(1.0, name="plain", trainable=False)
        return tower_fn("a")()

    with tf.Graph().as_default():
        for index in (1, 0, 1):
            with pytest.raises(KeyError, match="boom"):
                build_on_two("replicated", failing_in(index, tower))
        step = v1.train.get_or_create_global_step()
        _, op, sync = build(BUILDERS["replicated"](TWO), tower, OPTIMIZERS["adam"])
        assert v1.train.get_global_step() is step
        copies = v1.local_variables()
        originals = {v.op.name: v for v in v1.global_variables() if v is not step}
        with new_session() as session:
            session.run(sync)
            for copy in copies:
                original = originals[variable_origin(copy).original]
                expect_equal(*session.run([[copy], [original]]))
            session.run([op, step])
    assert len(copies) == len(originals) == 3 + 2 * 2 + 2


def test_a_build_that_fails_late_leaves_the_graph_usable():
    with tf.Graph().as_default(), v1.variable_scope("", reuse=v1.AUTO_REUSE):
        with pytest.raises(TypeError, match=r"optimizer must be .*got str"):
            build(BUILDERS["replicated"](TWO), tower_fn("a"), lambda: "adam")
        grads, op = build_on_two("replicated", tower_fn("a"), "adam")
        with new_session() as session:
            got = train(session, grads, op)
    expect_equal(got, alone("replicated", ("a",), 5.0, "adam"))
