"""Updates that XLA compiles do what they do uncompiled, on one device or several."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core import map_towers, towers
from tw_core.internal import apply_pairs, create_slots
from tw_core.testing import CPUS

kinds = keras.optimizers
OPTIMIZERS = {
    "momentum and decay": lambda: kinds.SGD(0.1, momentum=0.9, weight_decay=0.1),
    "schedule": lambda: kinds.Adam(kinds.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "averages": lambda: kinds.AdamW(0.1, clipnorm=1.0, use_ema=True),
    "clipped together": lambda: kinds.Adam(0.1, global_clipnorm=1.0),
    "state of its own": lambda: kinds.Nadam(0.1),
    "whole variables": lambda: kinds.Lamb(0.1),
    "paths": lambda: kinds.Muon(0.1),
    "scaled": lambda: kinds.LossScaleOptimizer(kinds.Adam(0.1)),
    "accumulating": lambda: kinds.Adam(
        0.1, gradient_accumulation_steps=2, weight_decay=0.1
    ),
    "version 1": lambda: tf.compat.v1.train.AdamOptimizer(0.1),
}


def trained(new, devices, *, jit_compile, steps=5, nan_at=None):
    """Returns four variables and an optimizer's state after some updates."""
    variables = []
    for n in range(4):
        with tf.device(devices[n % len(devices)]):
            start = np.linspace(0, 1 + n, 6, dtype="f").reshape(2, 3)
            variables.append(keras.Variable(start, name=f"v{n}"))
    optimizer = new()
    create_slots(optimizer, variables)

    @tf.function(autograph=False)
    def step(*grads):
        pairs = list(zip(grads, variables, strict=True))
        apply_pairs(optimizer, pairs, jit_compile=jit_compile)

    for k in range(steps):
        grads = [np.linspace(-1, 1 + n + k, 6, dtype="f") for n in range(4)]
        grads[2] *= np.nan if k == nan_at else 1
        step(*(tf.constant(own.reshape(2, 3)) for own in grads))
    state = optimizer.variables
    state = state() if callable(state) else state
    return [np.array(tf.convert_to_tensor(own)) for own in (*variables, *state)]


CASES = [
    (name, count)
    for name in OPTIMIZERS
    for count in ([1] if name == "version 1" else [1, 2])
]


@pytest.mark.slow(by_day=["version 1-1"])
@pytest.mark.parametrize(("name", "num_devices"), CASES)
def test_a_compiled_update_does_what_it_does_uncompiled(name, num_devices):
    if name == "paths" and not hasattr(kinds, "Muon"):
        pytest.skip("this Keras has no Muon")
    want = trained(OPTIMIZERS[name], CPUS[:1], jit_compile=False)
    for jit_compile in (False, True):
        got = trained(OPTIMIZERS[name], CPUS[:num_devices], jit_compile=jit_compile)
        for own, other in zip(got, want, strict=True):
            np.testing.assert_allclose(own, other, 2e-6, 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_compiled_step_that_overflows_changes_the_scale_alone(num_devices):
    new = OPTIMIZERS["scaled"]
    arguments = {"jit_compile": True, "nan_at": 2}
    before = trained(new, CPUS[:num_devices], **arguments, steps=2)
    after = trained(new, CPUS[:num_devices], **arguments, steps=3)
    np.testing.assert_array_equal(after[:4], before[:4])
    changed = [
        (own, other)
        for own, other in zip(before, after, strict=True)
        if not np.array_equal(own, other)
    ]
    assert [(s, float(own), float(o)) for s, (own, o) in enumerate(changed)] == [
        (0, 2.0, 0.0),  # steps since
        (1, 32768.0, 16384.0),
    ]


def test_what_cannot_be_compiled_is_refused():
    with pytest.raises(
        ValueError,
        match=r"AdamOptimizer updates variables on \['/.*"
        r"XLA compiles for one device; use an optimizer of Keras 3",
    ):
        trained(OPTIMIZERS["version 1"], CPUS[:2], jit_compile=True)
    table = tf.Variable(tf.ones([3, 2]), name="table")
    momentum = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)
    create_slots(momentum, [table])
    says = (
        r"True: MomentumOptimizer updates .*; got ResourceSparse\w+ of table:0. Use d"
    )
    for compiled in (False, True):  # by itself, or as part of a function

        @tf.function(autograph=False, jit_compile=compiled)
        def step(compiled=compiled):
            shape = tf.constant([3, 2])
            rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), shape)
            apply_pairs(momentum, [(rows, table)], jit_compile=not compiled)

        with pytest.raises(ValueError, match=says):
            step()
    variable = tf.Variable(1.0)
    with pytest.raises(RuntimeError, match=r"part of a tf\.function; apply the grad"):
        apply_pairs(kinds.SGD(0.1), [(tf.ones([]), variable)], jit_compile=True)
    with pytest.raises(
        ValueError,
        match=r"jit_compile=True compiles a trace "
        r"for all towers only; add trace='once'",
    ):
        map_towers(len, towers(CPUS[:1]), jit_compile=True)


def test_towers_compile_and_read_variables_of_others_together():
    with tf.device(CPUS[1]):
        many = [tf.Variable(tf.fill([n + 1], float(n))) for n in range(5)]
        large = tf.Variable(tf.ones([70, 70]))
    ours = towers(CPUS[:2])

    def total(tower, x):
        return x + tf.reduce_sum(large) + sum(map(tf.reduce_sum, many))

    @tf.function(autograph=False)
    def step(xs):
        return map_towers(total, ours, xs, trace="once", jit_compile=True)

    got = step([tf.constant(1.0), tf.constant(2.0)])
    np.testing.assert_array_equal(got, [4941.0, 4942.0])
    nodes = step.get_concrete_function([tf.ones([])] * 2).graph.get_operations()
    joined = [op for op in nodes if op.type == "ConcatV2"]
    assert len(joined) == 1  # for tower 0, whose device has none of them
