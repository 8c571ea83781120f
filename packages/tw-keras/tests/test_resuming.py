"""Every way of saving and every way of resuming, against a run that never ended."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import CPUS

from tw_keras import TowerModel
from tw_reduce import compression

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(24, 40)).astype("float32")
Y = RANDOM.normal(size=(24, 64)).astype("float32")
MODES = {
    "replicated": {},
    "sharded": {"variables": "sharded"},
    "shared": {"variables": "parameter_server"},
    "remembered": {"reducer": compression.error_feedback(compression.top_k(0.02))},
    "factored": {"reducer": compression.power_sgd(rank=2)},
}


def make():
    keras.utils.set_random_seed(1)
    own = [keras.layers.Dense(128, "tanh"), keras.layers.Dense(64)]
    model = keras.Sequential([keras.Input([40]), *own])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def made(mode, num_towers, make_model=make):
    model = TowerModel(make_model, CPUS[:num_towers], **MODES[mode])
    if make_model is make:
        model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def fit(model, epochs, *callbacks, first=0):
    options = {"batch_size": 10, "shuffle": False, "verbose": 0}
    options |= {"epochs": epochs, "initial_epoch": first}
    model.fit(X, Y, callbacks=list(callbacks), **options)


def by_loading(mode, towers, folder):
    """``save`` and ``save_weights``, then ``load_weights`` into a built model."""
    for save, name in (("save", "m.keras"), ("save_weights", "m.weights.h5")):
        model = made(mode, towers)
        fit(model, 2)
        getattr(model, save)(folder / name)
        model = made(mode, towers)
        model.optimizer.build(model.trainable_variables)
        model.load_weights(folder / name)
        fit(model, 4, first=2)
        yield model


def by_checkpoint_of_keras(mode, towers, folder):
    """``ModelCheckpoint``, then a ``make_model`` that loads the file."""
    path = folder / "m.keras"
    fit(made(mode, towers), 2, keras.callbacks.ModelCheckpoint(path))
    model = made(mode, towers, lambda: keras.models.load_model(path))
    fit(model, 4, first=2)
    yield model


def by_checkpoint_of_tensorflow(mode, towers, folder):
    model = made(mode, towers)
    fit(model, 2)
    path = tf.train.Checkpoint(model=model).save(folder / "m")
    model = made(mode, towers)
    tf.train.Checkpoint(model=model).restore(path)
    model.copy_to_replicas()
    fit(model, 4, first=2)
    yield model


def by_backup(mode, towers, folder):
    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    model = made(mode, towers)
    backup = keras.callbacks.BackupAndRestore(folder / "backup")
    with pytest.raises(KeyboardInterrupt):
        fit(model, 4, backup, Fails())
    model = made(mode, towers)
    fit(model, 4, keras.callbacks.BackupAndRestore(folder / "backup"))
    yield model


RESUMES = [by_loading, by_checkpoint_of_keras, by_checkpoint_of_tensorflow, by_backup]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("towers", [1, 2, 3])
@pytest.mark.parametrize("resume", RESUMES)
def test_a_run_that_resumes_has_the_bits_of_one_that_never_ended(
    tmp_path, resume, towers, mode
):
    if "reducer" in MODES[mode] and "checkpoint" in resume.__name__:
        pytest.skip("these files have no memory of a reducer")
    undisturbed = made(mode, towers)
    fit(undisturbed, 4)
    for model in resume(mode, towers, tmp_path):
        for own in model.towers:
            for one, two in zip(
                own.get_weights(), undisturbed.get_weights(), strict=True
            ):
                np.testing.assert_array_equal(one, two)
