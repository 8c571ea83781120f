"""Random models train in steps that XLA compiles as they do by Keras on one device.

The models are those of tw-keras' tests; layers whose state is for all towers are left
out, which ``fit`` compares.
"""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.random_models import OPTIMIZERS, ROWS, Drawn

import tw_ampopt
import tw_builders
from tw_core import LeastLoadedDeviceSetter, map_towers, replicate, towers
from tw_core.testing import CPUS
from tw_reduce import all_reduce, mean
from tw_rlload import DeviceBatch, EpochFunction

kinds = keras.optimizers
RATE, STEPS = 0.02, 6
SEEDS = range(24)
LOSSES = {
    "mse": keras.losses.MeanSquaredError(reduction=None),
    "huber": keras.losses.Huber(reduction=None),
    "classes": keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=None
    ),
}
# What tw_ampopt does in place of optimizers that scale, accumulate or have a schedule.
BY_AMPOPT = {
    "scaled": {
        "tf_optimizer": partial(kinds.Adam, epsilon=1e-2),
        "loss_scale": tw_ampopt.DynamicLossScale(growth_interval=3),
    },
    "accumulating": {
        "tf_optimizer": partial(kinds.Adam, epsilon=1e-2),
        "accumulation_steps": 2,
    },
    "schedule": {
        "tf_optimizer": partial(kinds.SGD, momentum=0.5),
        "learning_rate": kinds.schedules.CosineDecay(RATE, 5),
    },
}


class Case:
    """A random model with its batches, cut for its towers."""

    def __init__(self, seed):
        self.drawn = drawn = Drawn(seed)
        for own in drawn.kinds.values():
            own[:] = [kind for kind in own if kind not in ("normalised", "counted")]
        self.way = WAYS[seed % 3]
        self.variables = ("replicated", "sharded", "shared")[seed // 3 % 3]  # builders
        if self.way is by_builders and self.variables == "shared":
            # XLA looks up no rows of a table on another device.
            drawn.inputs = [name for name in drawn.inputs if name != "w"] or ["v"]
        self.num_towers = drawn.num_towers
        self.towers = towers(CPUS[: self.num_towers])
        x, y, weights = drawn.data
        self.columns = {**x, "y": y}
        self.columns["weight"] = np.ones(ROWS, "f") if weights is None else weights
        # With weights of towers, of which the first has a row more.
        self.is_uneven = drawn.is_weighted and self.way is not by_epoch_function
        self.rows = max(1, drawn.batch_size // self.num_towers)  # of a tower
        size = self.rows * self.num_towers + self.is_uneven
        self.batches = [self.at(np.arange(size) + n * size) for n in range(STEPS)]

    def at(self, places):
        return {name: own[places % ROWS] for name, own in self.columns.items()}

    def parts(self, batch):
        """Returns the towers' rows of a batch."""
        cut = {k: np.array_split(own, self.num_towers) for k, own in batch.items()}
        every = range(self.num_towers)
        return [{k: tf.constant(own[n]) for k, own in cut.items()} for n in every]

    def make(self):
        keras.utils.set_random_seed(1)
        return self.drawn.made()

    def new_optimizer(self):
        return OPTIMIZERS[self.drawn.optimizer](RATE)

    def loss(self, model, rows):
        inputs = {name: rows[name] for name in self.drawn.inputs}
        losses = LOSSES[self.drawn.loss](rows["y"], model(inputs, training=True))
        mean_loss = tf.reduce_mean(losses * rows["weight"])
        return tf.add_n([mean_loss, *model.losses])

    def gradients(self, model, rows, scale=1.0):
        with tf.GradientTape() as tape:
            loss = self.loss(model, rows) * scale
        return tape.gradient(loss, model.trainable_variables)

    def weights(self, parts):
        return [own["y"].shape[0] for own in parts] if self.is_uneven else None


def by_keras(case):
    """Trains on one device, and not compiled."""
    model, optimizer = case.make(), case.new_optimizer()
    optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def step(rows):
        scale = optimizer.scale_loss(tf.constant(1.0))
        grads = map(tf.convert_to_tensor, case.gradients(model, rows, scale))
        optimizer.apply(list(grads), model.trainable_variables)

    for batch in case.batches:
        step({name: tf.constant(own) for name, own in batch.items()})
    return model


def by_builders(case):
    ours, number = case.towers, case.num_towers
    if case.variables == "shared":
        setter = LeastLoadedDeviceSetter(CPUS[0], list(CPUS[:number]))
        with tf.variable_creator_scope(setter.create):
            replicas = [case.make()]
    else:
        replicas = replicate(ours, lambda tower: case.make())
    owners = ours[: len(replicas)]
    make = tw_builders.make_optimizers
    if case.variables == "sharded":
        make = tw_builders.make_sharded_optimizer
    optimizers = make(owners, case.new_optimizer, replicas)

    @tf.function(autograph=False)
    def step(parts):
        scale = optimizers[0].scale_loss(tf.constant(1.0))
        models = replicas * (number // len(replicas))
        weights = case.weights(parts)
        grads = map_towers(
            lambda tower, model, rows: case.gradients(model, rows, scale),
            *(ours, models, parts),
            trace="once",
            jit_compile=True,
        )
        if case.variables == "sharded":
            tw_builders.apply_sharded_gradients(
                *(ours, grads, replicas, optimizers[0]),
                weights=weights,
                jit_compile=True,
            )
        elif case.variables == "shared":
            variables = models[0].trainable_variables
            pairs = [list(zip(own, variables, strict=True)) for own in grads]
            tw_builders.apply_shared_gradients(
                pairs, optimizers[0], weights=weights, jit_compile=True
            )
        else:
            reduce = mean(all_reduce(CPUS[:number]), weights=weights)
            tw_builders.apply_gradients(
                ours, reduce(grads), replicas, optimizers, jit_compile=True
            )

    for batch in case.batches:
        step(case.parts(batch))
    return replicas


def by_ampopt(case):
    models = replicate(case.towers, lambda tower: case.make())
    name = case.drawn.optimizer
    options = {"tf_optimizer": OPTIMIZERS[name], "learning_rate": RATE}
    optimizer = tw_ampopt.TowerOptimizer(
        [model.trainable_variables for model in models],
        **options | BY_AMPOPT.get(name, {}),
    )

    @tf.function(autograph=False)
    def step(parts):
        def gradients(tower, model, rows):
            scale = optimizer.apply_loss_scaling(tf.constant(1.0))
            return case.gradients(model, rows, scale)

        grads = map_towers(
            *(gradients, case.towers, models, parts), trace="once", jit_compile=True
        )
        optimizer.apply(grads, weights=case.weights(parts), jit_compile=True)

    for batch in case.batches:
        step(case.parts(batch))
    return models


def by_epoch_function(case):
    models = replicate(case.towers, lambda tower: case.make())
    optimizers = map_towers(lambda tower: case.new_optimizer(), case.towers)
    specs = {
        name: tf.TensorSpec([None, *own.shape[1:]], own.dtype)
        for name, own in case.columns.items()
    }
    batch = DeviceBatch(case.towers, specs, max_per_device_batch_size=case.rows)
    function = EpochFunction(batch, case.loss, models, optimizers, jit_compile=True)
    # A device's rows of all steps lie together.
    shape = (STEPS, case.num_towers, case.rows)
    batch.load(case.at(np.arange(np.prod(shape)).reshape(shape).swapaxes(0, 1).ravel()))
    function.run_epochs(1)
    return models


WAYS = (by_builders, by_ampopt, by_epoch_function)


@pytest.mark.full("21", "22", "14")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_is_trained_compiled_as_by_keras_on_one_device(seed):
    case = Case(seed)
    want = [v.numpy() for v in by_keras(case).trainable_variables]
    for model in case.way(case):
        for own, wanted in zip(model.trainable_variables, want, strict=True):
            np.testing.assert_allclose(own.numpy(), wanted, 2e-6, 2e-6, own.path)
