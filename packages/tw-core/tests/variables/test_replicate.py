"""One copy of a model per tower, on its device, equal to tower 0's."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core import TowerContext, copy_to_replicas, replicate, towers
from tw_core.devices import canonical_device

v1 = tf.compat.v1
TOWERS = towers(["/cpu:4", "/cpu:5", "/cpu:6"])


class Linear(tf.Module):
    """A module with a trainable and another variable."""

    def __init__(self, tower=None):
        super().__init__()
        self.w = tf.Variable(tf.random.normal([3, 2]), name="w")
        self.count = tf.Variable(0, trainable=False, name="count")

    def __call__(self, x):
        return x @ self.w


def sequential(tower=None):
    return keras.Sequential(
        [
            keras.Input([3]),
            keras.layers.Dense(2),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
        ]
    )


FACTORIES = pytest.mark.parametrize("factory", [Linear, sequential])


def variables(model):
    return [v if isinstance(v, tf.Variable) else v.value for v in model.variables]


def devices(model):
    return {canonical_device(v.device) for v in variables(model)}


# Outside of graphs.


@FACTORIES
def test_replicas_are_on_their_towers_and_equal_tower_0s(factory):
    replicas = replicate(TOWERS, factory)
    assert [devices(r) for r in replicas] == [{f"/device:CPU:{i}"} for i in (4, 5, 6)]
    for column in zip(*map(variables, replicas), strict=True):
        if column[0].shape == [2] and column[0].dtype.is_integer:
            continue  # the state of a random generator
        for copy in column[1:]:
            assert copy is not column[0]
            np.testing.assert_array_equal(copy, column[0])


def test_random_generators_keep_states_of_their_own():
    def factory(tower):
        return keras.Sequential(
            [keras.Input([64]), keras.layers.Dropout(0.5, seed=tower.index)]
        )

    first, second, _ = replicate(TOWERS, factory)
    masks = [
        model(tf.ones([1, 64]), training=True).numpy() for model in (first, second)
    ]
    assert not np.array_equal(*masks)


@pytest.mark.parametrize("method", [True, False])
def test_anything_with_variables_will_do(method):
    class Holder:
        def __init__(self, tower):
            held = [tf.Variable(float(tower.index))]
            self.variables = (lambda: held) if method else held

    replicas = replicate(TOWERS, Holder)  # which gets each tower
    held = [r.variables() if method else r.variables for r in replicas]
    assert [float(v[0]) for v in held] == [0.0, 0.0, 0.0]


# In a session graph.


def test_in_a_session_graph_names_differ_by_tower_and_the_copy_makes_equal(graph):
    with tf.name_scope("outer"):
        replicas = replicate(TOWERS, Linear)
    names = [[v.name for v in variables(r)] for r in replicas]
    assert names[0] == ["outer/count:0", "outer/w:0"]
    assert names[2] == ["outer/tower2/count:0", "outer/tower2/w:0"]
    first, *others = map(variables, replicas)
    assert set(v1.global_variables()) == set(first)
    assert set(v1.local_variables()) == {v for vs in others for v in vs}
    copy = copy_to_replicas([variables(r) for r in replicas])
    for k, replica in enumerate(replicas):  # whose names stay free for contexts
        vs_name = f"tower{k}" if k else ""
        with TowerContext(f"tower{k}", is_training=True, vs_name=vs_name):
            assert replica(tf.ones([1, 3])).name == f"tower{k}/matmul:0"
    with v1.Session() as sess:
        sess.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        before = sess.run([r.w for r in replicas])
        assert not np.array_equal(before[0], before[1])
        sess.run(copy)
        for w in sess.run([r.w for r in replicas]):
            np.testing.assert_array_equal(w, before[0])


def test_get_variable_code_gets_variables_of_its_own_in_a_session_graph(graph):
    def factory(tower):
        return SimpleNamespace(variables=[v1.get_variable("w", [2])])

    replicas = replicate(TOWERS, factory)
    names = [r.variables[0].name for r in replicas]
    assert names == ["w:0", "tower1/w:0", "tower2/w:0"]


# What is refused.


def test_functions_and_models_without_their_variables_are_refused():
    @tf.function(autograph=False)
    def traced():
        replicate(TOWERS, Linear)

    want = (
        "replicate: makes variables, and so must be called outside of the tf.function"
    )
    with pytest.raises(RuntimeError, match=want):
        traced()
    want = r"returned Sequential 'late' without its variables; .*model.build\(input_sha"
    with pytest.raises(ValueError, match=want):
        replicate(
            TOWERS, lambda _: keras.Sequential([keras.layers.Dense(2)], name="late")
        )


def test_copies_that_differ_are_refused():
    class Growing(tf.Module):
        def __init__(self, tower):
            self.w = tf.Variable(tf.zeros([tower.index + 1]), name="w")

    want = r"The towers' variables must agree .*'\(1,\)'.*'\(2,\)'.*'\(3,\)'"
    with pytest.raises(ValueError, match=want):
        replicate(TOWERS, Growing)
    model = Linear()
    want = r"got shared ones: count:0 in towers \[0, 1, 2\], w:0 in towe"
    with pytest.raises(ValueError, match=want):
        replicate(TOWERS, lambda _: model)
    with pytest.raises(ValueError, match=r"Unknown devices \['/cpu:99'\]"):
        replicate(towers(["/cpu:0", "/cpu:99"]), lambda _: pytest.fail("was called"))


def test_an_exception_in_the_factory_leaves_no_scope_open(graph):
    def factory(tower):
        if tower.index:
            raise KeyError("boom")
        return Linear()

    with pytest.raises(KeyError, match="boom"):
        replicate(TOWERS, factory)
    made = v1.get_variable("v", [1])
    assert (made.name, made.device) == ("v:0", "")
    assert made in v1.global_variables()
