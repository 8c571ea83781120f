"""``TowerModel`` with tw-ampopt's optimizer: scaling, accumulation, skipping."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tw_core
from tw_ampopt import DynamicLossScale, TowerOptimizer
from tw_core.testing import CPUS
from tw_keras import TowerModel

layers = keras.layers
KINDS = ["replicated", "parameter_server"]


def make_model(dtype="float32"):
    return keras.Sequential(
        [
            keras.Input([6]),
            layers.Dense(8, "relu", dtype=dtype),
            layers.Dense(3, dtype=dtype),
        ]
    )


def data():
    random = np.random.default_rng(0)
    x = random.standard_normal([33, 6]).astype(np.float32)
    return x, random.integers(0, 3, 33)


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def over_towers(devices, variables, **options):
    """Makes a TowerModel that momentum with the options trains."""
    towers = tw_core.towers(devices)
    model = TowerModel(make_model, towers, variables=variables)
    shared = variables == "parameter_server"
    lists = [own.trainable_variables for own in model.towers]
    optimizer = TowerOptimizer(
        lists[0] if shared else lists,
        towers=towers if shared else None,
        tf_optimizer="tf.train.MomentumOptimizer",
        momentum=0.9,
        learning_rate=options.pop("learning_rate", 0.05),
        **options,
    )
    model.compile(optimizer, loss(), metrics=["accuracy"])
    return model, optimizer


def fit(model, **options):
    given = {"batch_size": 10, "epochs": 3, "shuffle": False, "verbose": 0, **options}
    return model.fit(*data(), **given).history


def check_same(one, many, rtol=1e-5):
    for name, values in one.items():
        np.testing.assert_allclose(many[name], values, rtol=rtol, err_msg=name)


# With four towers, of which one is without rows at the end, each with each; with fewer
# a kind with and the other without a scale.
TRAINED = [(variables, 4, scaled) for variables in KINDS for scaled in (True, False)]
TRAINED += [("replicated", 1, True), ("parameter_server", 1, False)]
TRAINED += [("replicated", 2, False), ("parameter_server", 2, True)]


@pytest.mark.slow(by_day=["replicated-4-True"])
@pytest.mark.parametrize(("variables", "num_towers", "scaled"), TRAINED)
def test_history_is_that_of_keras_on_one_device(variables, num_towers, scaled):
    devices = CPUS[:num_towers]
    rule = DynamicLossScale(init=8) if scaled else None
    many, optimizer = over_towers(devices, variables, loss_scale=rule)
    if scaled:  # A batch that overflows is skipped by all.
        x, y = data()
        x[5] = np.inf
        before = many.get_weights()
        many.train_on_batch(x[:10], y[:10])
        for tower in many.towers:
            np.testing.assert_equal(tower.get_weights(), before)
        assert int(optimizer.statistics()["skipped_updates"]) == 1
    one = make_model()
    one.set_weights(many.get_weights())
    one.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        loss(),
        metrics=["accuracy"],
        jit_compile=False,
    )
    check_same(fit(one), fit(many))


def of_words():
    """Reads a table so that its gradient has each word of a batch once, and again."""
    words = keras.Input([4], dtype="int64")
    bag = keras.Input([6], sparse=True)
    embedded = layers.GlobalAveragePooling1D()(layers.Embedding(6, 3)(words))
    return keras.Model([words, bag], embedded + layers.Dense(3)(bag))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*shuffle=True.*")
def test_rows_of_sparse_gradients_are_squared_as_on_one_device():
    random = np.random.default_rng(0)
    x = random.integers(0, 6, [18, 4]), random.integers(0, 2, [18, 6]) * 1.0
    x = x[0], tf.sparse.from_dense(tf.cast(x[1], tf.float32))
    batches = tf.data.Dataset.from_tensor_slices((x, data()[1][:18])).batch(8)
    many, one = TowerModel(of_words, CPUS[:2]), of_words()
    one.set_weights(many.get_weights())
    adam = TowerOptimizer(
        [own.trainable_variables for own in many.towers],
        tf_optimizer=keras.optimizers.Adam,
        learning_rate=0.05,
    )
    many.compile(adam, loss())
    one.compile(keras.optimizers.Adam(0.05), loss(), jit_compile=False)
    histories = [own.fit(batches, epochs=2, verbose=0).history for own in (one, many)]
    check_same(*histories)
    for own, plain in zip(many.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(own, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("variables", KINDS)
@pytest.mark.parametrize("num_towers", [2, 4])
def test_accumulated_batches_make_the_update_of_all_their_rows(variables, num_towers):
    devices = CPUS[:num_towers]
    many, optimizer = over_towers(devices, variables, accumulation_steps=2)
    one, _ = over_towers(devices[:1], "replicated")
    one.set_weights(many.get_weights())
    x, y = data()
    fit(many, epochs=1)  # batches of 10, 10, 10 and 3
    for start in (0, 20):
        one.train_on_batch(x[start : start + 20], y[start : start + 20])
    for own, plain in zip(many.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(own, plain, rtol=1e-5, atol=1e-6)
    assert int(optimizer.statistics()["updates"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_losses_that_are_added_make_the_update_of_one_device(run_eagerly):
    summed = keras.losses.SparseCategoricalCrossentropy(True, reduction="sum")
    ends = []
    for count in (1, 3):
        model, optimizer = over_towers(CPUS[:count], "replicated", learning_rate=0.005)
        keras.utils.set_random_seed(0)
        model.set_weights([np.random.normal(size=w.shape) for w in model.get_weights()])
        model.compile(optimizer, summed, run_eagerly=run_eagerly)
        fit(model, epochs=1)
        ends.append(model.get_weights())
    for own, plain in zip(*ends, strict=True):
        np.testing.assert_allclose(own, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_callbacks_change_a_rate_that_is_a_variable_and_files_are_the_models(tmp_path):
    devices = CPUS[:2]
    rate = tf.Variable(0.05)
    many, _ = over_towers(devices, "replicated", learning_rate=rate)
    schedule = keras.callbacks.LearningRateScheduler(lambda _, rate: rate * 0.5)
    fit(many, epochs=2, callbacks=[schedule])
    np.testing.assert_allclose(rate.numpy(), 0.0125)
    many.save(tmp_path / "model.keras")
    keras.saving.save_model(many, tmp_path / "other.keras")
    x, _ = data()
    for name in ("model", "other"):
        loaded = keras.models.load_model(tmp_path / f"{name}.keras")
        np.testing.assert_allclose(
            loaded.predict(x, verbose=0), many.predict(x, verbose=0), rtol=1e-5
        )
    fit(many, epochs=1)
    fixed, _ = over_towers(devices, "replicated")
    with pytest.raises(ValueError, match=r"pass a tf\.Variable to it as learning_rate"):
        fit(fixed, callbacks=[schedule])


def test_an_optimizer_of_fewer_towers_is_refused_when_it_is_compiled():
    model = TowerModel(make_model, CPUS[:2], variables="parameter_server")
    optimizer = TowerOptimizer(
        model.trainable_variables, tf_optimizer="tf.train.AdamOptimizer"
    )
    with pytest.raises(ValueError, match=r"for 1 towers, .* has 2; .*model\.devices"):
        model.compile(optimizer, loss())


def test_sharded_variables_are_refused():
    devices = CPUS[:2]
    model = TowerModel(make_model, devices, variables="sharded")
    lists = [own.trainable_variables for own in model.towers]
    with pytest.raises(ValueError, match="TowerOptimizer updates all towers' variabl"):
        model.compile(TowerOptimizer(lists), loss())
