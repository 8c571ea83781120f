"""A gradient of a shape known only at run time is checked then, and named."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from function_ways import make_apply
from session_builders import BUILDERS, build, new_session

from tw_builders import SyncMultiGPUReplicatedBuilder
from tw_core import towers
from tw_core.testing import CPUS
from tw_reduce import broadcast, packed, sum_balanced

v1 = tf.compat.v1
TWO = list(CPUS[:2])
SHAPES = {"w": (2, 3), "b": (4,), "table": (5, 2), "large": (17_000,)}
BUILDERS = BUILDERS | {
    "replicated, packed": partial(
        SyncMultiGPUReplicatedBuilder,
        average=True,
        mode=packed(broadcast(partial(sum_balanced, devices=TWO))),
    ),
}
STATIC = {"unknown": lambda shape: None, "known in part": lambda s: [None] * len(s)}
WRONG = {
    "w": np.ones((3, 2), np.float32),
    "b": np.ones(3, np.float32),
    "large": np.ones(16_999, np.float32),
    "table": np.ones((3, 3), np.float32),
}
each_builder = pytest.mark.parametrize("builder", BUILDERS)
each_wrong = pytest.mark.parametrize("wrong", WRONG)
each_static = pytest.mark.parametrize("static", STATIC)
descend = partial(v1.train.GradientDescentOptimizer, 1.0)


def rows_of(values):
    return tf.IndexedSlices(values, tf.range(tf.shape(values)[0]))


def right_values():
    random = np.random.default_rng(5)
    rows = {"table": (3, 2)}
    return [
        {
            name: random.integers(-3, 4, rows.get(name, shape)).astype(np.float32)
            for name, shape in SHAPES.items()
        }
        for _ in TWO
    ]


def build_fed(builder, static):
    """Builds a step on gradients that are fed; returns [K] feeds by name as well."""
    fed = []

    def tower():
        names = {
            name: v1.placeholder(tf.float32, STATIC[static](shape))
            for name, shape in SHAPES.items()
        }
        fed.append(names)
        return [
            (
                rows_of(names[name]) if name == "table" else names[name],
                v1.get_variable(name, shape, initializer=v1.zeros_initializer()),
            )
            for name, shape in SHAPES.items()
        ]

    grads, op, _ = build(BUILDERS[builder](TWO), tower, descend)
    return op, fed, grads


def feed(fed, values):
    return {
        place: own[name]
        for names, own in zip(fed, values, strict=True)
        for name, place in names.items()
    }


@each_builder
@each_static
def test_gradients_of_the_right_shape_train_as_in_numpy(builder, static):
    values = right_values()
    with tf.Graph().as_default():
        op, fed, grads = build_fed(builder, static)
        with new_session() as session:
            session.run(op, feed(fed, values))
            got = {v.op.name: session.run(v) for _, v in grads[0]}
    for name, shape in SHAPES.items():
        want = np.zeros(shape, np.float32)
        for own in values:
            want[: len(own[name])] -= own[name] / 2
        np.testing.assert_array_equal(got[name], want)


@each_builder
@each_static
@each_wrong
@pytest.mark.parametrize("tower", [[0], [1], [0, 1]])
def test_a_gradient_of_another_shape_is_refused_by_name(builder, static, wrong, tower):
    values = right_values()
    for k in tower:
        values[k][wrong] = WRONG[wrong]
    with tf.Graph().as_default():
        op, fed, _ = build_fed(builder, static)
        name = f"check_gradient_shape/tower[{tower[0]}{tower[-1]}]/(tower1/)?{wrong}"
        with (
            new_session() as session,
            pytest.raises(tf.errors.InvalidArgumentError, match=name),
        ):
            session.run(op, feed(fed, values))


@pytest.mark.parametrize("kind", ["v1", "keras"])
@pytest.mark.parametrize("way", ["replicated", "shared", "sharded"])
def test_in_a_function_as_well(kind, way):
    ours, variables = towers(TWO), []
    for device in TWO[: 1 if way == "shared" else 2]:
        with tf.device(device):
            variables.append([tf.Variable(tf.zeros([2, 3]), name="w")])
    make = descend if kind == "v1" else partial(keras.optimizers.SGD, 1.0)
    apply, _ = make_apply(way, ours, make, variables, list)

    @tf.function(
        autograph=False,
        input_signature=[[tf.TensorSpec([None, None]), tf.TensorSpec(None)]],
    )
    def step(grads):
        apply([[grad] for grad in grads])

    step([tf.ones([2, 3])] * 2)
    np.testing.assert_array_equal(variables[0][0], -np.ones([2, 3]))
    for k in range(2):
        grads = [tf.ones([3, 2] if k == j else [2, 3]) for j in range(2)]
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=f"check_gradient_shape/tower{k}/w"
        ):
            step(grads)


@each_builder
def test_known_shapes_cost_nothing(builder):
    with tf.Graph().as_default() as graph:

        def tower():
            return [
                (tf.ones(shape), v1.get_variable(name, shape))
                for name, shape in SHAPES.items()
            ]

        build(BUILDERS[builder](TWO), tower, descend)
        names = [op.name for op in graph.get_operations()]
    assert not [name for name in names if "check_gradient_shape" in name]
