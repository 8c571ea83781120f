"""tw-ampopt inside builders, and tw-rlload with tw-ampopt and reducers.

All train a softmax regression on handwritten digits, and must end where they do
with TensorFlow's own optimizer.
"""

from functools import cache, partial

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from conformance.rows import reducers
from programs.digits_towers import (
    FLAT_BELOW,
    FLAT_WAYS,
    PROGRAMS,
    WAYS,
    accuracy,
    batch,
    cross_entropy,
    digits,
    get_weights,
    make_model,
)

import tw_ampopt
import tw_builders
import tw_core
import tw_rlload
from tw_core.flat_variables import FlatVariables, pack_gradients
from tw_core.testing import CPUS
from tw_reduce.reducers import CollectiveKeys

v1 = tf.compat.v1
STEPS, TOWERS, EPOCHS, ROWS = 30, 2, 3, 32
ADAM = {"tf_optimizer": v1.train.AdamOptimizer, "learning_rate": 0.05}
FAMILIES = {  # all of them Adam, to the same epsilon
    "v1": {},
    "Keras 3": {"tf_optimizer": keras.optimizers.Adam, "epsilon": 1e-8},
    "tf_keras": {"tf_optimizer": tf_keras.optimizers.legacy.Adam, "epsilon": 1e-8},
}
each_mode = pytest.mark.parametrize("mode", PROGRAMS)


def plain(variables):
    return v1.train.AdamOptimizer(0.05)


def ampopt(mode, **options):
    options = {**ADAM, "loss_scale": tw_ampopt.DynamicLossScale(), **options}
    if mode == "session":
        return lambda variables: tw_ampopt.Optimizer(**options)
    return lambda variables: tw_ampopt.TowerOptimizer(variables, **options)


def train(program, first, last):
    for step in range(first, last):
        program.step(*batch(step))


def memory(program, family):
    """[copies][3] variables, and what v1's optimizers each keep of all of them."""
    if family != "v1":
        return (program.variables,)
    every = [
        [
            optimizer.get_slot(v, slot)
            for copy in program.trained
            for v in copy
            for slot in "mv"
        ]
        for optimizer in program.optimizers
    ]
    slots = [[slot for slot in own if slot is not None] for own in every]
    assert {len(own) for own in slots} == {2 * len(program.trained[0])}
    return program.variables, slots


@pytest.mark.slow(
    by_day=[
        *(
            "v1-replicated-session",
            "v1-parameter server-function",
            "v1-sharded-session",
        ),
        *("v1-flat replicated-function", "v1-flat sharded-session"),
        *("v1-flat parameter server-session", "Keras 3-sharded-session"),
        *("tf_keras-sharded-function", "v1-flat sharded-function"),
    ]
)
@each_mode
@pytest.mark.parametrize(
    ("family", "way"),
    [
        *(("v1", way) for way in (*WAYS, *FLAT_WAYS)),
        *(("Keras 3", "sharded"), ("tf_keras", "sharded")),
    ],
)
def test_ampopt_in_a_builder_skips_an_infinity_and_ends_where_its_optimizer_does(
    family, mode, way
):
    plainly = PROGRAMS[mode](way, plain)
    train(plainly, 0, STEPS)
    wanted = plainly.read(plainly.variables)[0]
    program = PROGRAMS[mode](way, ampopt(mode, **FAMILIES[family]))
    train(program, 0, 3)
    kept = memory(program, family)
    before = program.read(kept)
    images, labels = batch(3)
    images = images.copy()
    images[-1, 0] = np.inf  # a row of the last tower
    program.step(images, labels)
    tf.nest.map_structure(np.testing.assert_array_equal, program.read(kept), before)
    told = [program.read(own.statistics()) for own in program.optimizers]
    assert [(s["updates"], s["skipped_updates"]) for s in told] == [(3, 1)] * len(told)
    assert {s["loss_scaling_log2"] for s in told} == {14.0}  # from 15
    train(program, 3, STEPS)
    after = program.read(kept)
    flat = zip(tf.nest.flatten(after), tf.nest.flatten(before), strict=True)
    assert all(not np.array_equal(value, old) for value, old in flat)
    for kept in after:
        same = [kept[0]] * len(kept)
        tf.nest.map_structure(np.testing.assert_array_equal, list(kept), same)
    assert len(after[0]) == (1 if "server" in way else TOWERS)
    for value, want in zip(after[0][0], wanted, strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-5)
    assert accuracy(*after[0][0]) >= 0.9


REDUCERS = reducers(CollectiveKeys())


class Policy:
    """What ``build_graph`` of tw-rlload returns."""

    def __init__(self, inputs, below_bytes=0):
        with FlatVariables(below_bytes).scope():
            weights = get_weights()
        self.loss = cross_entropy(weights, *inputs)

    def gradients(self, optimizer):
        return pack_gradients(optimizer.compute_gradients(self.loss))


def learnt_in_a_session(make_optimizer, *, is_flat=False, **options):
    """Loads the digits onto two towers, and trains whole epochs in one call."""
    with (
        tf.Graph().as_default(),
        v1.Session(config=tw_core.session_config()) as session,
    ):
        columns = [v1.placeholder(tf.float32, [None, 64], "images")]
        columns.append(v1.placeholder(tf.int64, [None], "labels"))
        devices = CPUS[:TOWERS]
        trainer = tw_rlload.LocalSyncParallelOptimizer(
            make_optimizer(None),
            devices,
            columns,
            [],
            ROWS,
            partial(Policy, below_bytes=FLAT_BELOW if is_flat else 0),
            **options,
        )
        init = [v1.global_variables_initializer(), v1.local_variables_initializer()]
        session.run(init)
        trainer.load_data(session, [*digits()[0]], [])
        trainer.optimize(session, 0)
        trainer.run_epochs(session, EPOCHS, "rows", seed=0)
        with v1.variable_scope("", reuse=True):
            return [session.run(get_weights())]


def learnt_in_a_function(make_optimizer, *, is_flat=False, **options):
    """The same with a ``DeviceBatch`` and a model a tower."""
    towers = tw_core.towers(CPUS[:TOWERS])
    specs = {
        "images": tf.TensorSpec([None, 64]),
        "labels": tf.TensorSpec([None], tf.int64),
    }
    rows = tw_rlload.DeviceBatch(towers, specs, max_per_device_batch_size=ROWS // 2)
    models = tw_core.replicate(towers, partial(make_model, is_flat))
    optimizers = [make_optimizer(model.trainable_variables) for model in models]
    train = tw_rlload.EpochFunction(
        rows,
        lambda own, x: own(x["images"], x["labels"]),
        models,
        optimizers,
        **options,
    )
    rows.load([*digits()[0]])
    train.optimize(0)
    train.run_epochs(EPOCHS, "rows", seed=0)
    plain = [model.model if is_flat else model for model in models]
    return [[v.numpy() for v in model.all] for model in plain]


LEARN = {"session": learnt_in_a_session, "function": learnt_in_a_function}


@cache
def learnt_plainly(mode):
    return LEARN[mode](plain)[0]


# The conformance table has each reducer in both modes; without one, towers are flat.
LEARNT = [
    ("session", "sum_collective", "v1"),
    ("function", "packed(broadcast(sum_balanced))", "v1"),
    ("session", "compress(sum_balanced, bfloat16)", "v1"),
    ("function", "packed(sum_balanced)", "Keras 3"),
    ("session", "packed(sum_balanced)", "tf_keras"),
    ("session", "", "plain"),
    ("function", "", "v1"),
    pytest.param("session", "", "v1", marks=pytest.mark.slow),
    pytest.param("function", "", "plain", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "name", "family"), LEARNT)
def test_rlload_with_siblings_ends_where_the_plain_optimizer_does(mode, name, family):
    options = {"reducer": REDUCERS[name](TOWERS)} if name else {"is_flat": True}
    make = plain if family == "plain" else ampopt(mode, **FAMILIES[family])
    got = LEARN[mode](make, **options)
    # Rounded on the wire, gradients differ in their third digit.
    tolerance = 0.1 if "bfloat16" in name else 1e-3
    for copy in got:
        for value, same, want in zip(copy, got[0], learnt_plainly(mode), strict=True):
            np.testing.assert_array_equal(value, same)
            np.testing.assert_allclose(value, want, atol=tolerance)
    assert accuracy(*got[0]) >= 0.9


@pytest.mark.slow(by_day=True)
def test_a_sharded_run_saves_the_names_of_a_replicated_one():
    def tower():
        variables = [
            v1.get_variable(f"layer/w{n}", [3 + n], dtype)
            for n, dtype in enumerate([tf.float16, tf.float32, tf.float16])
        ]
        return [(tf.ones(v.shape, v.dtype), v) for v in variables]

    def saved(make_builder):
        with tf.Graph().as_default():
            builder = make_builder(list(CPUS[:TOWERS]), average=True)
            grads = builder.call_for_each_tower(tower)
            builder.build(grads, lambda: tw_ampopt.Optimizer(master_copies=True))
            return {v.name: v.shape.as_list() for v in v1.global_variables()}

    sharded = saved(tw_builders.SyncMultiGPUShardedBuilder)
    assert any("w0_master" in name for name in sharded)
    assert sharded == saved(tw_builders.SyncMultiGPUReplicatedBuilder)
