"""Epochs of tw-rlload in one call over tw-builders' sharded towers, in both modes.

A step adds, weighs and clips as for towers that apply for themselves, so that the bits
must be theirs. The data are whole numbers.
"""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tw_ampopt
import tw_builders
import tw_core
import tw_rlload
from tw_core.testing import CPUS

v1 = tf.compat.v1
# Of 2 towers, 0 owns the first and the third. No loss reaches the last.
SHAPES = {"kernel": [4, 3], "out": [3], "bias": [], "idle": [2]}
ROWS = np.random.default_rng(0).integers(-2, 3, (22, 4)).astype(np.float32)
SCALED = {
    "tf_optimizer": v1.train.MomentumOptimizer,
    "learning_rate": 2**-7,
    "momentum": 0.5,
    "loss_scale": tw_ampopt.DynamicLossScale(),
}
V1 = {
    "v1 momentum": partial(v1.train.MomentumOptimizer, 2**-7, 0.5),
    "v1 Adam": partial(v1.train.AdamOptimizer, 2**-5),
    "legacy Adam": partial(tf_keras.optimizers.legacy.Adam, 2**-5),
}
KERAS = {
    "Keras 3 Adam": partial(keras.optimizers.Adam, 2**-5),
    "Keras 3 scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(2**-7, momentum=0.5)
    ),
}
AMPOPT = "tw-ampopt"


def loss_of(variables, rows, weights):
    kernel, out, bias, _ = variables
    errors = tf.linalg.matvec(rows @ kernel, out) + bias
    return tw_rlload.weighted_mean(tf.square(errors), weights)


class Policy:
    """What ``build_graph`` returns."""

    def __init__(self, inputs, weights):
        one = v1.ones_initializer()
        self.variables = [
            v1.get_variable(name, shape, initializer=one)
            for name, shape in SHAPES.items()
        ]
        self.loss = loss_of(self.variables, inputs[0], weights)

    def gradients(self, optimizer):
        if hasattr(optimizer, "compute_gradients"):
            return optimizer.compute_gradients(self.loss, self.variables)
        grads = tf.gradients(self.loss, self.variables)  # tf_keras's legacy ones
        return list(zip(grads, self.variables, strict=True))


def in_a_session(family, num_towers, *, is_sharded, rows=ROWS, clip):
    """Returns each tower's values."""
    make = partial(tw_ampopt.Optimizer, **SCALED) if family == AMPOPT else V1[family]
    with (
        tf.Graph().as_default(),
        v1.Session(config=tw_core.session_config(num_cpus=num_towers)) as session,
    ):
        trainer = tw_rlload.LocalSyncParallelOptimizer(
            make(),
            CPUS[:num_towers],
            [v1.placeholder(tf.float32, [None, 4], "rows")],
            [],
            4,
            Policy,
            clip,
            remainder="pad",
            apply_fn=tw_builders.apply_at_owners if is_sharded else None,
        )
        session.run(v1.global_variables_initializer())
        session.run(v1.local_variables_initializer())
        if is_sharded:
            builder = tw_builders.SyncMultiGPUReplicatedBuilder
            session.run(builder.get_post_init_ops())
        trainer.load_data(session, [rows], [])
        trainer.run_epochs(session, 2, "rows", seed=0)
        trainer.optimize(session, 0)
        return session.run([p.variables for p in trainer.get_device_losses()])


class Model(tf.Module):
    def __init__(self, tower=None):
        super().__init__()
        self.all = [tf.Variable(tf.ones(s), name=name) for name, s in SHAPES.items()]

    def __call__(self, rows, weights):
        return loss_of(self.all, rows, weights)


def in_a_function(family, num_towers, *, is_sharded, rows=ROWS, clip):
    """Returns each tower's values."""
    towers = tw_core.towers(CPUS[:num_towers])
    batch = tw_rlload.DeviceBatch(
        towers,
        {"rows": tf.TensorSpec([None, 4])},
        max_per_device_batch_size=4,
        remainder="pad",
    )

    models = tw_core.replicate(towers, Model)

    def make(variables):
        if family == AMPOPT:
            return tw_ampopt.TowerOptimizer(variables, **SCALED)
        return (V1 | KERAS)[family]()

    if is_sharded:
        owned = tw_builders.owned_variables(towers, models)
        made = partial(make, owned)
        optimizers = [tw_builders.make_sharded_optimizer(towers, made, models)[0]]
        options = {"apply_fn": tw_builders.apply_at_owners}
    else:
        optimizers = [make(list(model.trainable_variables)) for model in models]
        options = {}
    train = tw_rlload.EpochFunction(
        batch,
        lambda model, inputs, weights: model(inputs["rows"], weights),
        models,
        optimizers,
        grad_norm_clipping=clip,
        **options,
    )
    batch.load([rows])
    train.run_epochs(2, "rows", seed=0)
    train.optimize(0)
    return [[v.numpy() for v in model.all] for model in models]


TRAIN = {"session": in_a_session, "function": in_a_function}
each_case = pytest.mark.parametrize(
    ("mode", "family"),
    [(mode, family) for mode in TRAIN for family in [*V1, AMPOPT]]
    + [("function", family) for family in KERAS],
)


def check_equal(copies, want):
    for copy in copies:
        np.testing.assert_equal(copy, want)


@pytest.mark.slow
@each_case
@pytest.mark.parametrize(("num_towers", "clip"), [(1, None), (2, 1.0), (3, None)])
def test_sharded_epochs_have_the_bits_of_replicated_ones(
    mode, family, num_towers, clip
):
    run = partial(TRAIN[mode], family, num_towers, clip=clip)
    got = run(is_sharded=True)
    want, *_ = run(is_sharded=False)
    assert len(got) == num_towers
    check_equal(got, want)
    assert not np.array_equal(want[0], np.ones([4, 3]))
    assert np.array_equal(want[3], np.ones([2]))


@pytest.mark.slow
@pytest.mark.parametrize("mode", TRAIN)
def test_an_infinity_in_one_tower_has_the_shards_skip_as_replicas_do(mode):
    rows = ROWS.copy()
    rows[-1, 0] = np.inf
    run = partial(TRAIN[mode], AMPOPT, 2, clip=None, rows=rows)
    got = run(is_sharded=True)
    want, *_ = run(is_sharded=False)
    check_equal(got, want)
    assert np.isfinite(want[0]).all()
    unhurt = TRAIN[mode](AMPOPT, 2, clip=None, is_sharded=True)
    assert not np.array_equal(unhurt[0][0], want[0])
