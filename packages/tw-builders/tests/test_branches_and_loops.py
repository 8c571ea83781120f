"""Training inside the branches and loops of graphs and functions."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from session_builders import REPEATABLE, build, new_session

from tw_builders import (
    apply_gradients,
    apply_sharded_gradients,
    apply_shared_gradients,
    make_optimizers,
    make_sharded_optimizer,
    owned_variables,
)
from tw_core import get_current_tower_context, towers
from tw_core.testing import CPUS

v1 = tf.compat.v1
TWO = list(CPUS[:2])
OURS = towers(TWO)
SIZES = (3, 17_000)
STEPS = 3
OPTIMIZERS = {
    "descent": partial(v1.train.GradientDescentOptimizer, 0.25),
    "momentum": partial(v1.train.MomentumOptimizer, 0.25, 0.5),
    "adam": partial(v1.train.AdamOptimizer, 0.25),
    "keras momentum": partial(keras.optimizers.SGD, 0.25, momentum=0.5),
    "keras adam": partial(keras.optimizers.Adam, 0.25),
}
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)
each_v1_optimizer = pytest.mark.parametrize(
    "optimizer", [name for name in OPTIMIZERS if not name.startswith("keras")]
)
each_sharing = pytest.mark.parametrize("way", ["own", "shared", "sharded"])


def after(op, value):
    """Gives ``value`` once ``op``, which may be None, has run."""
    with tf.control_dependencies([op] if op is not None else []):
        return tf.identity(value)


# What surrounds a step: each calls it once where ``on``, and returns how often.


def directly(step, on):
    del on
    return after(step(), 1)


def in_cond(step, on):
    return tf.cond(on, lambda: after(step(), 1), lambda: tf.constant(0))


def in_cond_of_cond(step, on):
    return tf.cond(on, lambda: in_cond(step, on), lambda: tf.constant(0))


def in_loop(step, on):
    limit = tf.cast(on, tf.int32)
    [count] = tf.while_loop(
        lambda i: i < limit, lambda i: after(step(), i + 1), [tf.constant(0)]
    )
    return count


PLACES = {fn.__name__: fn for fn in (directly, in_cond, in_cond_of_cond, in_loop)}
each_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


def make_variables(way):
    made = []
    for device in TWO[: 1 if way == "shared" else 2]:
        with tf.device(device if way == "sharded" else None):
            made.append([tf.Variable(tf.fill([n], 3.0), name=f"w{n}") for n in SIZES])
    return made * 2 if way == "shared" else made


def make_optimizers_of(way, optimizer, variables=None):
    """Makes state early where there are ``variables``."""
    make = OPTIMIZERS[optimizer]
    if way == "sharded" and variables is not None:
        return make_sharded_optimizer(OURS, make, variables)[:1]
    return make_optimizers(OURS, make, variables)


def make_step(variables, optimizers, *, way):
    """Returns a function that makes one step on the mean loss (w - k)² / 2."""

    def step():
        grads = [
            [w.read_value() - float(k) for w in own] for k, own in enumerate(variables)
        ]
        if way == "shared":
            pairs = [list(zip(tower, variables[0], strict=True)) for tower in grads]
            return apply_shared_gradients(pairs, optimizers[0])
        if way == "sharded":
            return apply_sharded_gradients(OURS, grads, variables, optimizers[0])
        means = [(one + other) / 2.0 for one, other in zip(*grads, strict=True)]
        return apply_gradients(OURS, [means, means], variables, optimizers)

    return step


@pytest.fixture(scope="module")
def expect():
    """Compares with one variable and one optimizer without towers, run eagerly."""
    wanted = {}
    for name, make in OPTIMIZERS.items():
        made, optimizer = [tf.Variable(tf.fill([n], 3.0)) for n in SIZES], make()
        for _ in range(STEPS):
            optimizer.apply_gradients([(w.read_value() - 0.5, w) for w in made])
        wanted[name] = [w.numpy() for w in made]

    def check(optimizer, variables):
        for own in variables:
            for got, want in zip(own, wanted[optimizer], strict=True):
                np.testing.assert_allclose(got, want, rtol=2e-6)

    return check


@each_place
@each_sharing
@pytest.mark.parametrize(
    ("optimizer", "wrapped"),
    [(n, w) for n in OPTIMIZERS for w in (False, True) if not (w and "keras" in n)],
)
def test_in_a_function_or_wrapped_graph_code(expect, place, way, optimizer, wrapped):
    variables = make_variables(way)
    optimizers = make_optimizers_of(way, optimizer, variables)
    step = make_step(variables, optimizers, way=way)

    def effect():
        op = step()
        assert wrapped or op is None  # takes place by itself
        return op

    if wrapped:
        on = tf.TensorSpec([], tf.bool, name="on")
        call = v1.wrap_function(lambda on: place(effect, on), [on])
    else:
        call = tf.function(lambda on: place(effect, on), autograph=False)
    for _ in range(STEPS):
        assert call(tf.constant(True)) == 1
    if place is not directly:
        assert call(tf.constant(False)) == 0
    expect(optimizer, variables)


@each_sharing
@each_optimizer
def test_in_a_function_that_a_session_graph_calls(expect, way, optimizer):
    with tf.Graph().as_default():
        variables = make_variables(way)
        if optimizer.startswith("keras"):
            optimizers = [OPTIMIZERS[optimizer]() for _ in TWO]
            lists = variables
            if way == "sharded":
                lists = [owned_variables(OURS, variables), variables[0]]
            for used, own in zip(optimizers, lists, strict=True):
                used.build(own)
        else:
            optimizers = make_optimizers_of(way, optimizer)
        step = make_step(variables, optimizers, way=way)

        @tf.function(autograph=False)
        def call():
            step()
            return tf.constant(1)

        fetch = call()
        with new_session() as session:
            for _ in range(STEPS):
                assert session.run(fetch) == 1
            expect(optimizer, session.run(variables))


@each_place
@pytest.mark.parametrize("builder", REPEATABLE)
@each_v1_optimizer
def test_builders_in_a_session_graph(expect, place, builder, optimizer):
    pairs = []

    def tower():
        k = get_current_tower_context().index
        made = [
            v1.get_variable(f"w{n}", n, initializer=v1.constant_initializer(3.0))
            for n in SIZES
        ]
        target = 0.5 if builder == "asynchronous" else float(k)
        return [(w.read_value() - target, w) for w in made]

    def step():
        made = REPEATABLE[builder](TWO)
        pairs[:], op, _ = build(made, tower, OPTIMIZERS[optimizer])
        return op

    with tf.Graph().as_default():
        on = v1.placeholder(tf.bool, [])
        count = place(step, on)
        with new_session() as session:
            for _ in range(STEPS):
                assert session.run(count, {on: True}) == 1
            expect(optimizer, session.run([[w for _, w in own] for own in pairs]))
            if place is not directly:
                assert session.run(count, {on: False}) == 0
