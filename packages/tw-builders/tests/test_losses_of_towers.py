"""In a tower the collections of losses have what they have without towers."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from session_builders import BUILDERS, build, new_session, pairs_of

from tw_core import map_towers, towers
from tw_core.contexts import PredictTowerContext, TrainTowerContext
from tw_core.testing import CPUS
from tw_core.variables import Replicated, Shared, VariableStore

v1 = tf.compat.v1
LOSSES = v1.GraphKeys.LOSSES, v1.GraphKeys.REGULARIZATION_LOSSES


def squares(factor):
    return lambda w: factor * tf.reduce_sum(w**2)


def model():
    """Returns 4 + 0.9 + 2.0 and the total of one regularizer alone, 0.9."""
    with v1.variable_scope("enc", regularizer=squares(0.1)):
        w = v1.get_variable("w", initializer=3.0)
    u = v1.get_variable("u", initializer=[1.0, 1.0], regularizer=squares(1.0))
    v1.losses.mean_squared_error([1.0], [w])
    v1.losses.get_regularization_losses()
    return v1.losses.get_total_loss(), w, u


def run(tensors):
    with new_session() as session:
        return session.run(tensors)


@pytest.mark.parametrize("flat", [0, 1000])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("kind", BUILDERS)
def test_every_tower_has_the_total_loss_of_one_device(kind, count, flat):
    losses = []

    def tower():
        loss, w, u = model()
        losses.append(loss)
        return pairs_of(loss, [w, u])

    with tf.Graph().as_default():
        builder = BUILDERS[kind](CPUS[:count], flat_below_bytes=flat)
        grads, *_ = build(builder, tower, v1.train.AdamOptimizer)
        grads = [[grad for grad, _ in own] for own in grads]
        for loss, (of_w, of_u) in zip(*run([losses, grads]), strict=True):
            np.testing.assert_allclose(loss, 4.0 + 0.9 + 2.0, rtol=1e-6)
            np.testing.assert_allclose(of_w, 4.0 + 0.6, rtol=1e-6)
            np.testing.assert_allclose(of_u, [2.0, 2.0], rtol=1e-6)


@pytest.mark.parametrize("count", [1, 3])
def test_outside_of_towers_the_graph_has_the_losses_of_all(count):
    with tf.Graph().as_default() as graph:
        builder = BUILDERS["parameter server"](CPUS[:count])
        before = v1.losses.mean_squared_error([1.0], [3.0])
        builder.call_for_each_tower(model)
        assert [len(graph.get_collection(key)) for key in LOSSES] == [1 + count, 2]
        assert graph.get_collection(LOSSES[0])[0] is before


def test_losses_from_outside_of_towers_are_shown_as_without_towers():
    with tf.Graph().as_default():
        w = v1.get_variable("w", initializer=3.0, regularizer=squares(0.1))
        v1.losses.add_loss(2.0 * w)
        builder = BUILDERS["parameter server"](CPUS[:2])

        def tower():
            with v1.variable_scope("", reuse=True):
                v1.get_variable("w", regularizer=squares(0.1))
            v1.losses.add_loss(w)
            return v1.losses.get_total_loss()

        losses = run(builder.call_for_each_tower(tower))
        np.testing.assert_array_equal(losses, np.float32([9.9, 9.9]))


def test_builds_of_one_graph_see_their_own_losses_and_what_they_share():
    def first():
        v1.get_variable("own", initializer=5.0, regularizer=squares(1.0))
        w = v1.get_variable("w", initializer=3.0, regularizer=squares(0.1))
        v1.losses.add_loss(w)
        return v1.losses.get_total_loss()

    def second():
        with v1.variable_scope("", reuse=v1.AUTO_REUSE):
            w = v1.get_variable("w", initializer=3.0, regularizer=squares(0.1))
        v1.losses.add_loss(10.0 * w)
        return v1.losses.get_total_loss()

    with tf.Graph().as_default():
        builder = BUILDERS["parameter server"](CPUS[:2])
        results = [builder.call_for_each_tower(fn) for fn in (first, second)]
        np.testing.assert_allclose(run(results), [[28.9] * 2, [30.9] * 2], rtol=1e-6)


def test_an_inference_tower_sees_its_own_losses():
    with tf.Graph().as_default():
        with TrainTowerContext("tower0"):
            trained, *_ = model()
        with v1.variable_scope("", reuse=True), PredictTowerContext("infer"):
            inferred, *_ = model()
        np.testing.assert_allclose(run([trained, inferred]), [6.9] * 2, rtol=1e-6)


@pytest.mark.parametrize("policy", [Shared(), Replicated()])
def test_map_towers_does_so_too(policy):
    store = VariableStore(policy)

    def tower(tower, scopes):
        with scopes.scope(tower):
            return model()[0]

    def losses(scopes):
        return map_towers(partial(tower, scopes=scopes), towers(CPUS[:3]))

    with tf.Graph().as_default():
        np.testing.assert_allclose(run(losses(policy)), [6.9] * 3, rtol=1e-6)
    step = tf.function(partial(losses, store), autograph=False)
    np.testing.assert_allclose(step(), [6.9] * 3, rtol=1e-6)


def test_scopes_that_a_tower_opens_keep_their_getters_and_names():
    def getter(getter, name, **asked):
        return tf.identity(getter(name, **asked), name=f"read_{name}")

    def tower():
        with v1.variable_scope("a", custom_getter=getter, regularizer=squares(1.0)):
            read = v1.get_variable("w", initializer=2.0)
        return read, v1.losses.get_total_loss()

    with tf.Graph().as_default():
        builder = BUILDERS["parameter server"](CPUS[:2])
        results = builder.call_for_each_tower(tower)
        assert [v.name for v in v1.global_variables()] == ["a/w:0"]
        assert [loss for _, loss in run(results)] == [4.0, 4.0]
        assert v1.get_variable_scope().custom_getter is None
