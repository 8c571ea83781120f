"""Epochs whose gradients and updates XLA compiles."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core import map_towers, replicate, towers
from tw_core.testing import CPUS
from tw_rlload import DeviceBatch, EpochFunction, weighted_mean

v1 = tf.compat.v1
RNG = np.random.default_rng(0)
X = RNG.standard_normal((40, 3)).astype("f")
ROWS = RNG.integers(0, 5, 40).astype("i")
SPECS = {"x": tf.TensorSpec([None, 3]), "row": tf.TensorSpec([None], tf.int32)}


# Of a variable on another device, XLA takes the value and no rows.
READ = {True: tf.convert_to_tensor, False: lambda table: table}


class Model(tf.Module):
    def __init__(self, *, is_shared=False):
        super().__init__()
        self.is_shared = is_shared
        self.table = tf.Variable(tf.ones([5, 3]), name="table")
        self.w = tf.Variable([0.5, -1.0, 2.0], name="w")
        self.unused = tf.Variable(1.0, name="unused")


def loss_of(model, inputs, weights=None):
    table = tf.gather(READ[model.is_shared](model.table), inputs["row"])
    errors = tf.square(tf.reduce_sum(inputs["x"] * table * model.w, 1) - 1.0)
    loss = tf.reduce_mean(errors) if weights is None else weighted_mean(errors, weights)
    return loss, {"largest": tf.reduce_max(errors)}


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))


def made(num_towers, jit_compile, make_optimizer, remainder="drop", **options):
    ours = towers(CPUS[:num_towers])
    batch = DeviceBatch(ours, SPECS, max_per_device_batch_size=4, remainder=remainder)
    is_shared = options.pop("shared", False)
    models = (
        [Model(is_shared=True)] if is_shared else replicate(ours, lambda tower: Model())
    )
    optimizers = map_towers(lambda tower: make_optimizer(), ours[: len(models)])
    function = EpochFunction(
        *(batch, loss_of, models, optimizers), jit_compile=jit_compile, **options
    )
    batch.load({"x": X, "row": ROWS})
    return function, models


CASES = {
    "keras": (2, lambda: keras.optimizers.Adam(0.01), {"grad_norm_clipping": 1.0}),
    "pads": (3, lambda: v1.train.AdamOptimizer(0.01), {"remainder": "pad"}),
    "scaled": (2, scaled, {"grad_norm_clipping": 1.0}),
    "rows": (
        *(4, lambda: v1.train.AdamOptimizer(0.01)),
        {"sparse_gradients": True},
    ),
    "shared": (2, lambda: keras.optimizers.SGD(0.01), {"shared": True}),
    "alone": (1, lambda: keras.optimizers.SGD(0.01), {"grad_norm_clipping": 1.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiled_epochs_are_those_of_uncompiled_ones(case):
    number, make_optimizer, options = CASES[case]
    found = []
    for jit_compile in (False, True):
        function, models = made(number, jit_compile, make_optimizer, **options)
        result = function.run_epochs(2, "rows", seed=3)
        last = function.optimize(0)["loss"]
        values = [v.numpy() for model in models for v in model.trainable_variables]
        found.append([result.losses, result.fetches["largest"], last, *values])
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, 2e-6, 2e-6)


def test_what_cannot_be_compiled_is_refused():
    with pytest.raises(ValueError, match="trace='once', or have loss_fn"):
        made(1, True, lambda: keras.optimizers.SGD(0.01), trace="each")
    with pytest.raises(TypeError, match="jit_compile"):
        made(1, "auto", lambda: keras.optimizers.SGD(0.01))
    elsewhere = keras.optimizers.SGD(0.01), keras.optimizers.SGD(0.01)
    with pytest.raises(
        ValueError, match=r"tower1 .*iteration:0 on .*CPU:0.*map_towers"
    ):
        made(2, True, iter(elsewhere).__next__)
