"""Programs of Keras 2: clipping, models that are not built, sessions.

Gradients that they clip between ``compute_gradients`` and ``apply_gradients`` are 3 and
-1, so that ranks that clip their own to 1.5 differ in the mean.
"""

import sys

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

hvd.init()
keras = tf.keras
own = 3.0 if hvd.rank() == 0 else -1.0
REDUCED = {hvd.Average: 1.0, hvd.Sum: 2.0}


def clip(pairs):
    return [(tf.clip_by_value(grad, -1.5, 1.5), variable) for grad, variable in pairs]


class Program:
    """An optimizer, its variables, and the ways in which programs use them."""

    def __init__(self, optimizers, op, passes, scale=None):
        made = hvd.DistributedOptimizer(
            optimizers.SGD(1.0), op=op, backward_passes_per_step=passes
        )
        self.seen = []
        self.optimizer = made
        if scale is not None:
            self.optimizer = keras.mixed_precision.LossScaleOptimizer(
                made, dynamic=False, initial_scale=scale
            )
        self.variables = [tf.Variable(0.0, name=name) for name in ("used", "unused")]

    def compute(self):
        with tf.GradientTape() as tape:
            loss = self.variables[0] * own
        is_legacy = not hasattr(self.optimizer, "compute_gradients")
        names = ["compute_gradients", "_compute_gradients"]
        compute = getattr(self.optimizer, names[is_legacy])
        pairs = compute(loss, self.variables, tape=tape)
        assert pairs[1][0] is None
        return pairs[:1]

    def apply(self, pairs):
        self.optimizer.apply_gradients(clip(pairs))

    def eagerly(self):
        pairs = self.compute()
        self.apply(pairs)
        return pairs[0][0]

    def in_a_function(self):
        return tf.function(self.eagerly)()

    def out_of_a_function(self):
        grads = tf.function(lambda: [grad for grad, _ in self.compute()])()
        self.apply(zip(grads, self.variables[:1], strict=True))
        return grads[0]

    def into_a_function(self):
        pairs = self.compute()
        tf.function(lambda grad: self.apply([(grad, self.variables[0])]))(pairs[0][0])
        return pairs[0][0]

    def in_each_branch(self):
        @tf.function
        def step(is_first):
            pairs = self.compute()
            if is_first:
                self.apply(pairs)
            else:
                self.apply([(2 * grad, variable) for grad, variable in pairs])
            return pairs[0][0]

        return step(tf.constant(True))

    def minimize(self):
        self.optimizer.minimize(lambda: self.variables[0] * own, self.variables)

    def without_compute(self):
        with tf.GradientTape() as tape:
            loss = self.variables[0] * own
        grads = tape.gradient(loss, self.variables[:1])
        self.optimizer.apply_gradients(zip(grads, self.variables[:1], strict=True))


STEPS = ("eagerly", "in_a_function", "out_of_a_function", "into_a_function")
STEPS += ("in_each_branch",)
kinds = keras.optimizers, keras.optimizers.legacy
programs = [(kinds[0], name, hvd.Sum) for name in STEPS]
programs += [(kind, "in_a_function", hvd.Average) for kind in kinds]
for kind, name, op in programs:
    for passes in 1, 2:
        program = Program(kind, op, passes)
        seen = [float(getattr(program, name)()) for _ in range(passes)]
        want = passes * REDUCED[op]
        assert seen == [own, want][-passes:], (kind, op, name, passes, seen)
        weight = float(program.variables[0])
        assert weight == -min(1.5, want), (kind, op, name, passes, weight)
        assert int(program.optimizer.iterations) == passes
        # Other gradients are reduced, unless a function may have returned these.
        if name not in ("out_of_a_function", "into_a_function"):
            for _ in range(passes):
                program.without_compute()
            assert float(program.variables[0]) == weight - want, (kind, op, name)

for kind, op in zip(kinds, REDUCED, strict=True):
    program = Program(kind, op, 1, scale=8.0)
    assert float(program.in_a_function()) == REDUCED[op]
    assert float(program.variables[0]) == -min(1.5, REDUCED[op])
    program.minimize()
    program.without_compute()
    assert float(program.variables[0]) == -min(1.5, REDUCED[op]) - 2 * REDUCED[op]

program = Program(kinds[0], hvd.Average, 2)
pairs = [*program.compute(), (tf.constant(1.0), program.variables[1])]
try:
    program.apply(pairs)
except ValueError as error:
    words = "takes all gradients from compute_gradients, or none; got 1 of 2"
    assert words in str(error), error
else:
    raise AssertionError("accepted gradients of which some are reduced")


class Clipped(keras.Sequential):
    def train_step(self, batch):
        rows, targets = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(rows, targets, self(rows, training=True))
        pairs = self.optimizer.compute_gradients(loss, self.trainable_variables, tape)
        self.optimizer.apply_gradients(clip(pairs))
        return {"loss": loss}


model = Clipped([keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), "mae")
row = np.ones([1, 1], np.float32)
model.fit(row * own, -row, epochs=1, verbose=0)
np.testing.assert_array_equal(model.get_weights()[0], [[-1.0]])  # not -(1.5 - 1) / 2


def train(optimizer, *, is_built, path=None):
    """Trains a model that has no input shape until it is built."""
    one = keras.initializers.Constant(1.0)
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer=one, name="dense")
    trained = keras.Sequential([dense])
    if is_built:
        trained.build([None, 1])
    trained.compile(hvd.DistributedOptimizer(optimizer), "mse")
    if path is not None and hvd.rank() == 0:
        trained = hvd.load_model(path)
    options = {"steps_per_epoch": 2, "momentum_correction": True}
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, **options),
        hvd.callbacks.LearningRateScheduleCallback(
            0.1, lambda epoch: 1 / epoch, start_epoch=2, staircase=False, **options
        ),
    ]
    rows = np.arange(4, dtype=np.float32).reshape(4, 1) + hvd.rank()
    fitted = {"epochs": 3, "batch_size": 2, "shuffle": False, "verbose": 0}
    trained.fit(rows, 0.5 * rows, callbacks=callbacks, **fitted)
    return trained


for make in (
    lambda: kinds[0].SGD(0.1, momentum=0.5),
    lambda: kinds[1].SGD(0.1, momentum=0.5),
    lambda: kinds[0].RMSprop(0.1, momentum=0.5),
):
    built, unbuilt = (train(make(), is_built=is_built) for is_built in (True, False))
    np.testing.assert_array_equal(built.get_weights(), unbuilt.get_weights())
    assert not np.array_equal(built.get_weights()[0], [[1.0]])
path = f"{sys.argv[1]}/saved.keras"
if hvd.rank() == 0:
    built.save(path)
steps = int(built.optimizer.iterations)
resumed = [train(make(), is_built=is_built, path=path) for is_built in (True, False)]
np.testing.assert_array_equal(resumed[0].get_weights(), resumed[1].get_weights())
assert {int(one.optimizer.iterations) for one in resumed} == {2 * steps}

v1 = tf.compat.v1
with tf.Graph().as_default(), v1.Session() as session:
    weight = v1.get_variable("weight", [], initializer=v1.zeros_initializer())
    optimizer = hvd.DistributedOptimizer(kinds[1].SGD(1.0), op=hvd.Sum)
    grads = optimizer.get_gradients(weight * own, [weight])
    done = optimizer.apply_gradients(clip(zip(grads, [weight], strict=True)))
    session.run(v1.global_variables_initializer())
    assert session.run([grads, done])[0] == [REDUCED[hvd.Sum]]
    assert session.run(weight) == -1.5
