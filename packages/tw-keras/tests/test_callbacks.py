"""Keras's callbacks, files and errors know a ``TowerModel`` for a Keras model."""

import functools
import os
import re
import signal
import tempfile
import threading
import traceback
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import (
    CPUS,
    Stepping,
    check_same,
    check_same_weights,
    cross_entropy,
    data_for,
    fit,
    mlp,
    on_one_device,
    over_towers,
    pair,
)

from tw_keras import TowerModel, on_rank_0
from tw_keras._following import may_save
from tw_reduce import mean, sum_on_device

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("tower")]


CALLBACKS = {
    "plateau": lambda _: keras.callbacks.ReduceLROnPlateau(
        monitor="loss", factor=0.1, patience=0, min_delta=10.0
    ),
    "early": lambda _: keras.callbacks.EarlyStopping(
        monitor="loss", patience=0, min_delta=10.0, restore_best_weights=True
    ),
    "tensorboard": lambda path: keras.callbacks.TensorBoard(
        path, histogram_freq=1, update_freq=1, profile_batch=0
    ),
    "backup": lambda path: keras.callbacks.BackupAndRestore(
        path, delete_checkpoint=False
    ),
    "checkpoint": lambda path: keras.callbacks.ModelCheckpoint(path / "{epoch}.keras"),
}


KINDS = {
    "replicated": {},
    "sharded": {"variables": "sharded"},
    "parameter server": {"variables": "parameter_server"},
}
each_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


@functools.cache
def called_on_one_device(name):
    """Returns the first weights, the model, its history and the names of its files."""
    one = on_one_device("mlp")
    first = one.get_weights()
    with tempfile.TemporaryDirectory() as folder:
        history = fit(one, "mlp", callbacks=[CALLBACKS[name](Path(folder))])
        return first, one, history, sorted(os.listdir(folder))


@pytest.mark.slow
@each_kind
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_do_what_they_do_on_one_device(name, options, tmp_path):
    first, one, history, written = called_on_one_device(name)
    many = over_towers("mlp", 3, first, **options)
    check_same(history, fit(many, "mlp", callbacks=[CALLBACKS[name](tmp_path)]))
    check_same_weights(one, many)
    assert sorted(os.listdir(tmp_path)) == written


@functools.cache
def four_epochs():
    """Returns the first weights, and the history on one device without a stop."""
    one = on_one_device("mlp")
    return one.get_weights(), fit(one, "mlp", epochs=4)


class Interrupts(keras.callbacks.Callback):
    """Sends Ctrl-C before the third batch of the third epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == (2, 2):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
@each_kind
def test_an_interrupted_run_can_be_saved_and_goes_on(options, tmp_path, request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    first, want = four_epochs()
    cut = over_towers("mlp", 3, first, **options)
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fit(cut, "mlp", epochs=4, callbacks=[backup, Interrupts()])
    cut.save(tmp_path / "cut.keras")
    loaded = keras.models.load_model(tmp_path / "cut.keras")
    check_same_weights(cut, loaded, rtol=0)
    assert int(loaded.optimizer.iterations) == 10
    again = over_towers("mlp", 2, first, **options)
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    got = fit(again, "mlp", epochs=4, callbacks=[backup])
    check_same({name: values[2:] for name, values in want.items()}, got, rtol=1e-7)


def test_towers_follow_what_is_set_on_the_first():
    one, many = pair("mlp", 2)
    fit(many, "mlp")
    many.towers[0].set_weights(one.get_weights())
    many.copy_to_replicas()
    for tower in many.towers:
        check_same_weights(one, tower, rtol=0)
    many.towers[0].set_weights([w + 1 for w in one.get_weights()])
    x, _ = data_for("mlp")
    np.testing.assert_allclose(
        many.predict(x, verbose=0), many.towers[0].predict(x, verbose=0), rtol=1e-9
    )


@pytest.mark.slow
@pytest.mark.parametrize("variables", ["replicated", "sharded", "parameter_server"])
def test_towers_freeze_what_is_frozen_in_the_first(variables):
    one, many = pair("mlp", 3, variables=variables)

    def check_trains_alike():
        for model in (one, many):
            model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), cross_entropy())
        one.jit_compile = False
        check_same(fit(one, "mlp"), fit(many, "mlp"))
        for tower in many.towers:
            check_same_weights(one, tower)

    for model in (one, many):
        model.layers[0].trainable = False
    check_trains_alike()
    for model in (one, many):
        model.layers[0].trainable = True
        model.layers[2].kernel.trainable = False
    check_trains_alike()


@pytest.mark.slow
def test_after_training_each_tower_is_an_ordinary_model():
    one, many = pair("mlp", 2)
    fit(one, "mlp")
    fit(many, "mlp")
    main = many.towers[0]
    main.jit_compile = False
    check_same(fit(one, "mlp"), fit(main, "mlp"))
    assert "apply" not in vars(main.optimizer)
    assert not [m for m in main.metrics if "update_state" in vars(m)]


# Wrong input.


def refused(error, message, make=mlp, devices=CPUS[:2], **options):
    with pytest.raises(error, match=message):
        TowerModel(make, devices, **options)


def test_what_cannot_be_copied_is_refused():
    shared = keras.layers.Dense(3)
    shared.build([None, 6])

    def sharing():
        return keras.Sequential([keras.Input([6]), shared])

    refused(ValueError, " must have variables of its own", sharing)
    widths = iter([3, 4])

    def differing():
        return keras.Sequential([keras.Input([6]), keras.layers.Dense(next(widths))])

    refused(ValueError, " must agree in shape", differing)
    one = mlp()
    refused(ValueError, " must have variables of its own", lambda: one)


def test_a_layer_that_was_adapted_in_one_tower_only_is_refused():
    def make(words=None):
        lookup = keras.layers.StringLookup(vocabulary=words)
        layers = [lookup, keras.layers.Embedding(9, 3), keras.layers.Flatten()]
        return keras.Sequential([keras.Input([1], dtype="string"), *layers])

    model = TowerModel(make, CPUS[:2])
    model.towers[0].layers[0].adapt(np.array(["a", "b"]))
    words = tf.constant([["a"], ["b"], ["c"]])
    with pytest.raises(ValueError, match=r"string_lookup.* call adapt in make_model"):
        model.predict(words, verbose=0)

    def adapted():
        layer = keras.layers.Normalization()
        layer.adapt(np.array([[1.0], [3.0]]))
        return keras.Sequential([keras.Input([1]), layer])

    model = TowerModel(adapted, CPUS[:2])
    got = model.predict(np.array([[1.0], [2.0], [3.0]]), verbose=0)
    np.testing.assert_allclose(got, [[-1], [0], [1]], atol=1e-6)
    model.towers[0].layers[0].adapt(np.array([[5.0], [6.0]]))
    with pytest.raises(ValueError, match=r"normalization.* call adapt in make_model"):
        model.predict(np.ones([3, 1]), verbose=0)


def test_arguments_are_checked():
    mine = keras.Sequential(name="mine")
    refused(TypeError, r"returns a new model.*got the model 'mine'", make=mine)
    averages = mean(functools.partial(sum_on_device, device=CPUS[0]))
    refused(ValueError, "reducer averages already", reducer=averages)
    with pytest.raises(ValueError, match="jit_compile must be True, False or 'auto'"):
        TowerModel(mlp, CPUS[:1]).compile("sgd", "mse", jit_compile="yes")
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        refused(ValueError, "cannot be made in the scope of a tf.distribute")


SHARED = "parameter_server"


def compiled(make, num_towers=2, **options):
    model = TowerModel(make, CPUS[:num_towers])
    model.compile(**{"optimizer": "sgd", "loss": cross_entropy(), **options})
    return model


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_variables_made_in_a_step_are_refused(run_eagerly):
    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)
            self.late = None

        def call(self, inputs, training=None):
            if training and self.late is None:
                self.late = tf.Variable(1.0, name="late")
            return self.dense(inputs)

    x, y = data_for("mlp")
    with pytest.raises(ValueError, match="a step would create the variable 'late'"):
        compiled(Late, run_eagerly=run_eagerly).fit(x, y, verbose=0)


def test_losses_that_cannot_be_combined_are_refused():
    def loss(reduction):
        return keras.losses.MeanSquaredError(reduction=reduction)

    class Own(keras.Sequential):
        def train_step(self, data):
            x, y = data
            loss = tf.reduce_sum(self.compiled_loss(y, self(x)) + self.losses)
            return {"loss": loss}

        def compiled_loss(self, y, predicted):
            return self._compile_loss(y, predicted)

    with pytest.raises(ValueError, match="must have a reduction other than 'none'"):
        compiled(mlp, loss=loss("none"))
    x, _ = data_for("mlp")
    for reduction in ("none", None):  # A step of one's own need not use the loss.
        model = compiled(lambda: Own(mlp().layers), loss=loss(reduction))
        with pytest.raises(ValueError, match="every loss that compute_loss uses must"):
            model.fit(x, x[:, :3], verbose=0)
    model = compiled(lambda: Own(mlp().layers), loss=loss("sum"))
    with pytest.raises(ValueError, match="cannot be separated from the regularizers"):
        model.fit(x, x[:, :3], verbose=0)


def test_state_that_towers_share_is_refused_by_name_where_xla_would_write_it():
    def make():
        norm = keras.layers.BatchNormalization(name="norm")
        return keras.Sequential([keras.Input([6]), norm, keras.layers.Dense(3)])

    model = TowerModel(make, CPUS[1:3], variables="parameter_server")
    model.compile("sgd", cross_entropy(), jit_compile=True)
    x, y = data_for("mlp")
    with pytest.raises(ValueError, match=r"XLA compiles a tower for its .*norm/movin"):
        model.fit(x, y, verbose=0)


def test_errors_of_keras_arrive_and_name_the_tower():
    x, y = data_for("mlp")
    model = compiled(mlp)
    with pytest.raises(ValueError, match="expected axis -1 of input shape") as caught:
        model.fit(x[:, :4], y, verbose=0)
    assert any("tower0 of 2" in note for note in caught.value.__notes__)
    with pytest.raises(ValueError, match="must call `compile"):
        TowerModel(mlp, CPUS[:2]).fit(x, y)


class OfSix(Stepping):
    """Its step assumes batches of six rows."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)

    def loss_of(self, data):
        x, y = data
        return tf.reduce_mean((self(x + tf.ones([6, 3], x.dtype)) - y) ** 2)


@pytest.mark.slow(by_day=["2-True-True"])
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("num_towers", [2, 3])
def test_an_error_of_a_step_for_whole_batches_has_the_rows(
    is_known, inline, num_towers
):
    data = tf.data.Dataset.from_tensor_slices((np.ones([12, 3]), np.ones([12, 2])))
    model = TowerModel(OfSix, CPUS[:num_towers], inline=inline)
    model.compile("sgd")
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as caught:
        model.fit(data.batch(6, drop_remainder=is_known), verbose=0)
    says = f"(in tower 0 of {num_towers}, which has {6 // num_towers} of the batch's 6 "
    assert any(note.startswith(says) for note in caught.value.__notes__)


@pytest.mark.parametrize("applies", ["optimizer", "own"])
def test_synchronised_layers_need_losses_weighed_by_the_optimizer_that_applies(applies):
    class Own(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
                if self.scaler:
                    loss = getattr(self, self.scaler).scale_loss(loss)
            variables = self.trainable_variables
            grads = tape.gradient(loss, variables)
            getattr(self, applies).apply(grads, variables)
            return {"loss": loss}

    def make(scaler):
        layers = [keras.Input([6]), keras.layers.BatchNormalization(synchronized=True)]
        model = Own([*layers, keras.layers.Dense(3)])
        model.scaler, model.own = scaler, keras.optimizers.SGD()
        return model

    x, y = data_for("mlp")
    for wrong in {None, "optimizer", "own"} - {applies}:
        with pytest.raises(ValueError, match=rf"differentiate self.{applies}.scale_l"):
            compiled(lambda wrong=wrong: make(wrong)).fit(x, y, verbose=0)
    compiled(lambda: make(applies)).fit(x, y, verbose=0)


class Refusing(keras.layers.Layer):
    """A layer that fails when it runs."""

    def call(self, x):
        check = tf.debugging.Assert(tf.reduce_all(x < 100), ["too large"])
        with tf.control_dependencies([check]):
            return tf.identity(x)


@pytest.mark.slow
@pytest.mark.parametrize("inline", [True, False])
def test_an_error_of_a_running_step_names_its_line(inline):
    def make():
        inner = [keras.Input([4]), Refusing(), keras.layers.Dense(1)]
        return keras.Sequential(inner)

    x = np.ones([8, 4])
    x[-1] = 1000  # in tower 1
    model = TowerModel(make, CPUS[:2], inline=inline)
    model.compile("sgd", "mse")
    for _ in range(5):
        with pytest.raises(tf.errors.OpError) as caught:
            model.fit(x, x[:, :1], batch_size=8, verbose=0)
        told = "".join(traceback.format_exception(caught.value))
        # TensorFlow leaves the lines out if a call was cancelled before it began.
        if "<stack traces unavailable>" not in told:
            break
    assert re.search(rf'{Path(__file__).name}", line \d+, in call\b', told)


@pytest.mark.parametrize(
    ("hook", "saves"),
    [
        ("on_train_begin", False),
        ("on_train_batch_end", False),
        ("on_epoch_begin", True),
        ("on_epoch_end", True),
        ("on_test_batch_end", True),
        ("on_train_end", True),
    ],
)
def test_what_has_no_hook_between_epochs_saves_nothing_there(hook, saves):
    own = type("Own", (keras.callbacks.Callback,), {hook: lambda *_, **__: None})()
    assert may_save([keras.callbacks.EarlyStopping(), own]) == saves
    assert may_save(keras.callbacks.CallbackList([on_rank_0(own)])) == saves
    assert may_save([own, keras.callbacks.BackupAndRestore("folder")])
