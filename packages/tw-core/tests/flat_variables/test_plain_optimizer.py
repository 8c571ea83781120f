"""An optimizer of flat variables is saved as one of the model's own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core.flat_variables import flatten, plain_optimizer
from tw_core.optimizers import apply_pairs, create_slots

v1 = tf.compat.v1
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "nadam": lambda: keras.optimizers.Nadam(0.1),
    "averaged": lambda: keras.optimizers.RMSprop(0.1, use_ema=True),
    "accumulated": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.1), initial_scale=2.0, dynamic_growth_steps=3
    ),
    "v1 momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "v1 adam": lambda: v1.train.AdamOptimizer(0.1),
}


def make_model():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    x = keras.layers.Dense(3, activation="tanh")(inputs)
    x = keras.layers.Dense(2_000, activation="tanh")(x)
    return keras.Model(inputs, keras.layers.Dense(1)(x))


class Module(tf.Module):
    """A checkpoint has v1 optimizers' slots of TensorFlow's variables only."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(2)
        self.kernels = [
            tf.Variable(0.3 * rng.standard_normal(shape), dtype=tf.float32)
            for shape in ((4, 3), (3, 2_000), (2_000, 1))
        ]
        self.bias = tf.Variable(tf.zeros([3]))

    def __call__(self, x):
        x = tf.tanh(x @ self.kernels[0] + self.bias)
        return tf.tanh(x @ self.kernels[1]) @ self.kernels[2]


def train(call, variables, optimizer, steps):
    for step in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((call(tf.fill([2, 4], 0.1 * step)) - 1) ** 2)
        grads = tape.gradient(loss, variables)
        apply_pairs(optimizer, list(zip(grads, variables, strict=True)))
    return float(loss)


def built(name, variables):
    optimizer = OPTIMIZERS[name]()
    create_slots(optimizer, variables)
    return optimizer


class Run:
    def __init__(self, name, *, flat):
        make = Module if name.startswith("v1") else make_model
        self.replica = flatten(make, below_bytes=4_096) if flat else make()
        self.model = self.replica.model if flat else self.replica
        self.optimizer = built(name, self.replica.trainable_variables)
        self.saved = self.optimizer
        if flat:
            self.saved = plain_optimizer(self.optimizer, OPTIMIZERS[name], self.replica)
        self.checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.saved)

    def train(self, steps):
        variables = self.replica.trainable_variables
        return train(self.replica, variables, self.optimizer, steps)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_either_goes_on_from_the_others_checkpoint(name, tmp_path):
    plain, flat = Run(name, flat=False), Run(name, flat=True)
    assert len(flat.replica.trainable_variables) < len(flat.model.trainable_variables)
    ends = [run.train(3) for run in (plain, flat)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)
    paths = [
        run.checkpoint.write(str(tmp_path / f"{n}"))
        for n, run in enumerate([plain, flat])
    ]
    names = tf.train.list_variables(paths[0])
    assert tf.train.list_variables(paths[1]) == names
    for key, _ in names:
        if key != "_CHECKPOINTABLE_OBJECT_GRAPH":
            np.testing.assert_allclose(
                *(tf.train.load_variable(path, key) for path in paths),
                rtol=1e-4,
                atol=1e-6,
            )
    expected = plain.train(2)
    ends = []
    for path in paths:
        for fresh in (Run(name, flat=False), Run(name, flat=True)):
            fresh.checkpoint.read(path).assert_existing_objects_matched()
            ends.append(fresh.train(2))
    assert ends == pytest.approx([expected] * 4, rel=1e-5)


def test_a_keras_file_has_it_and_loads_without_flat_variables(tmp_path):
    run = Run("adam", flat=True)
    run.train(3)
    run.model.compile(run.saved, "mse")
    run.model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    end = train(loaded, loaded.trainable_variables, loaded.optimizer, 2)
    assert end == pytest.approx(run.train(2), rel=1e-5)


def test_what_cannot_be_saved_so_is_refused():
    run = Run("adam", flat=True)
    with pytest.raises(TypeError, match="must return a Adam"):
        plain_optimizer(run.optimizer, OPTIMIZERS["nadam"], run.replica)
    with pytest.raises(ValueError, match="has no state yet"):
        plain_optimizer(OPTIMIZERS["adam"](), OPTIMIZERS["adam"], run.replica)
    with pytest.raises(TypeError, match="what flatten returned"):
        plain_optimizer(run.optimizer, OPTIMIZERS["adam"], run.model)


class Keeping(keras.optimizers.SGD):
    """Keeps a slot where nothing says whose it is."""

    def build(self, variables):
        super().build(variables)
        self.kept = {"first": self.add_variable_from_reference(variables[0], "kept")}


def test_state_that_nobody_can_place_is_refused():
    replica = flatten(make_model, below_bytes=4_096)
    optimizer = Keeping(0.1)
    create_slots(optimizer, replica.trainable_variables)
    with pytest.raises(TypeError, match=r"Keeping keeps .*kept neither by itself"):
        plain_optimizer(optimizer, lambda: Keeping(0.1), replica)
