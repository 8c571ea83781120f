"""Checkpoints of every kind go into every other, also into models that have trained."""

import functools
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import CPUS

from tw_builders._owners import owned
from tw_keras import TowerModel

layers = keras.layers
OPTIONS = {"dtype": "float64"}
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.standard_normal([12, 6]), RANDOM.standard_normal([12, 3])
KINDS = {
    "plain": None,
    "replicated-2": {},
    "replicated-4": {},
    "sharded-1": {"variables": "sharded"},
    "sharded-2": {"variables": "sharded"},
    "sharded-3": {"variables": "sharded"},
    "server-2": {"variables": "parameter_server"},
}


pytestmark = pytest.mark.usefixtures("in_float64")


def net():
    return keras.Sequential(
        [
            keras.Input([6], dtype="float64"),
            layers.Dense(9, "tanh", **OPTIONS),
            layers.BatchNormalization(momentum=0.7, synchronized=True, **OPTIONS),
            layers.Dense(3, **OPTIONS),
        ]
    )


def adam():
    return keras.optimizers.Adam(0.05, epsilon=1e-3)


def make(kind, optimizer=adam, make_model=net):
    """Makes a model of a kind, compiled, and not trained."""
    if KINDS[kind] is None:
        model = make_model()
    else:
        towers = int(kind.rpartition("-")[2])
        model = TowerModel(make_model, CPUS[:towers], **KINDS[kind])
    model.compile(optimizer(), "mse", jit_compile=False)
    return model


def train(model, seed):
    """Trains on rows that are different for each seed; returns the losses."""
    x = X + np.random.default_rng(seed).standard_normal(X.shape)
    options = {"batch_size": 6, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(x, Y, **options).history["loss"]


def state_of(model):
    return [
        *model.get_weights(),
        *(own.numpy() for own in model.optimizer.variables),
    ]


def check(model, state, *, rtol=0.0):
    """Checks that a model, its optimizer included, has this state."""
    for own, want in zip(state_of(model), state, strict=True):
        np.testing.assert_allclose(own, want, rtol=rtol, atol=rtol)


def checkpoint(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def restore(status):
    status.assert_existing_objects_matched()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns a function of a kind: its files, its state, and how it goes on."""

    @functools.cache
    def save(kind):
        path = tmp_path_factory.mktemp(kind)
        keras.utils.set_random_seed(0)
        model = make(kind)
        train(model, 1)
        both = checkpoint(model).save(str(path / "both"))
        alone = tf.train.Checkpoint(model).save(str(path / "alone"))
        model.save_weights(path / "m.weights.h5")
        model.save(path / "m.keras")
        state = state_of(model)
        backup = keras.callbacks.BackupAndRestore(path, delete_checkpoint=False)
        model.fit(X, Y, batch_size=6, shuffle=False, verbose=0, callbacks=[backup])
        backed_up = state_of(model)
        train(model, 2)
        return path, both, alone, state, backed_up, state_of(model)

    return save


@pytest.fixture(scope="module")
def trained():
    """Returns a function of a kind: a model that has trained; one for all tests."""

    @functools.cache
    def model(kind):
        made = make(kind)
        train(made, 3)
        return made

    return model


@pytest.mark.slow
@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", KINDS)
def test_a_model_that_has_trained_goes_on_from_any_checkpoint(
    source, target, saved, trained
):
    path, both, alone, state, backed_up, later = saved(source)
    model = trained(target)
    loads = [
        lambda: restore(checkpoint(model).restore(both)),
        lambda: restore(tf.train.Checkpoint(model).restore(alone)),
        lambda: model.load_weights(path / "m.weights.h5"),
    ]
    for load in loads:
        train(model, 4)
        load()
        check(model, state)
        # Copies that only the next step shows have been restored, too.
        model.fit(X, Y, batch_size=6, shuffle=False, verbose=0)
        check(model, backed_up, rtol=1e-9)
        train(model, 2)
        check(model, later, rtol=1e-9)
    backup = keras.callbacks.BackupAndRestore(path, delete_checkpoint=False)
    model.fit(X, Y, batch_size=6, shuffle=False, verbose=0, callbacks=[backup])
    check(model, backed_up, rtol=1e-9)  # The file's epoch is the last one.
    model._initial_epoch = None  # which Keras leaves to the fit after this one


def build_before(model):
    """Compiles with an optimizer that was built."""
    optimizer = adam()
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse", jit_compile=False)


def build_after(model):
    model.optimizer.build(model.trainable_variables)


def build_trained(model):
    train(model, 3)
    model.set_weights([np.zeros_like(own) for own in model.get_weights()])
    build_after(model)


BUILDS = [build_before, build_after, build_trained]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("kind", ["replicated-2", "sharded-3", "server-2"])
@pytest.mark.slow(
    by_day=[
        *("sharded-3-build_before", "sharded-3-build_trained", "server-2-build_after")
    ]
)
def test_an_optimizer_may_be_built_for_the_models_variables(kind, build):
    one, many = make("plain"), make(kind)
    many.set_weights(one.get_weights())
    for model in (one, many):
        build(model)
    np.testing.assert_allclose(train(many, 1), train(one, 1), rtol=1e-9)
    check(many, state_of(one), rtol=1e-9)
    assert many.optimizer._trainable_variables == many.trainable_variables
    assert vars(many.optimizer).keys() == vars(one.optimizer).keys()
    if kind == "sharded-3":  # Slots are with the owners of their variables.
        owners = owned([tower.trainable_variables for tower in many.towers])
        devices = [own.value.device for own in owners]
        assert len(set(devices)) == 3
        for slots in (many.optimizer._momentums, many.optimizer._velocities):
            assert [own.value.device for own in slots] == devices


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicated-2", "sharded-3", "server-2"])
def test_variables_are_excluded_from_weight_decay_in_all_towers(kind):
    def train_without(kind):
        keras.utils.set_random_seed(0)
        optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.5)
        model = make(kind, lambda: optimizer)
        optimizer.exclude_from_weight_decay(var_list=model.trainable_variables[::2])
        train(model, 1)
        return state_of(model)

    for own, want in zip(train_without(kind), train_without("plain"), strict=True):
        np.testing.assert_allclose(own, want, 1e-9, 1e-9)


@pytest.mark.slow(by_day=["server-2-plain", "sharded-3-plain", "plain-sharded-3"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        *((kind, "plain") for kind in list(KINDS)[1:]),
        *(("plain", kind) for kind in ("replicated-2", "sharded-3", "server-2")),
    ],
)
def test_a_saved_model_is_a_plain_one_and_goes_on_alone_or_in_towers(
    source, target, saved
):
    path, _, _, state, _, later = saved(source)
    with zipfile.ZipFile(path / "m.keras") as file:
        config = file.read("config.json").decode()
    assert "tw_" not in config and '"class_name": "Sequential"' in config

    def load():
        return keras.models.load_model(path / "m.keras")

    if target == "plain":
        model = load()
        model.jit_compile = False
    else:
        model = TowerModel(load, CPUS[:3], **KINDS[target])
    check(model, state)
    model.fit(X, Y, batch_size=6, shuffle=False, verbose=0)
    train(model, 2)
    check(model, later, rtol=1e-9)


def test_an_optimizer_of_another_model_is_refused_as_keras_refuses_it():
    other = net()
    other.compile(adam(), "mse", jit_compile=False)
    train(other, 1)
    # Keras 3.8 fails to write its own message: it names variables with their values.
    refusals = NotImplementedError, ValueError
    kinds = []
    for kind in ("plain", "sharded-2"):
        model = make(kind, lambda: other.optimizer)
        with pytest.raises(refusals, match=r"Unknown variable|numpy\(\)") as caught:
            train(model, 1)
        assert "make_sharded_optimizer" not in str(caught.value), kind
        kinds.append(caught.type)
    assert kinds[0] is kinds[1]
