"""Programs as Keras's users write them give what they give on one device."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import CPUS, Stepping, check_near, seeded, towers_of

from tw_keras import TowerModel

layers = keras.layers
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 4)).astype("float32")
Y = X[:, :1].copy()
TOKENS = RANDOM.integers(0, 5, size=(40, 6))
WEIGHTS = RANDOM.random(40).astype("float32")
OF_TOKENS = RANDOM.normal(size=(40, 6, 1)).astype("float32")


def dense():
    return keras.Sequential(
        [keras.Input([4]), layers.Dense(3, "tanh"), layers.Dense(1)]
    )


def by_weight():
    return keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


def two_outputs():
    x = keras.Input([4])
    return keras.Model(x, [layers.Dense(1, name=name)(x) for name in "ab"])


def masked():
    x = keras.Input([6], dtype="int32")
    embedded = layers.Embedding(5, 4, mask_zero=True)(x)
    return keras.Model(x, layers.Dense(1)(embedded))


class Positions(keras.Model):
    """A table of places, of which every tower reads the same ones, some twice."""

    def __init__(self):
        super().__init__()
        self.words, self.places = layers.Embedding(5, 4), layers.Embedding(9, 4)
        self.last = layers.Dense(1)

    def call(self, words):
        places = keras.ops.arange(keras.ops.shape(words)[1]) // 2
        x = self.words(words) + self.places(places)
        return self.last(keras.ops.mean(x, axis=1))


def characters():
    return keras.Sequential([keras.Input([6, 4]), layers.Dense(5)])


class AddsLosses(layers.Layer):
    """Adds a mean over rows."""

    def call(self, x):
        self.add_loss(0.1 * tf.reduce_mean(x**2))
        return x


def adding_losses():
    inner = [keras.Input([4]), layers.Dense(3), AddsLosses(), layers.Dense(1)]
    return keras.Sequential(inner)


def regularized():
    model = adding_losses()
    for layer in model.layers[::2]:
        layer.kernel_regularizer = keras.regularizers.L2(0.1)
        layer.kernel.regularizer = layer.kernel_regularizer
    return model


def synchronised():
    norm = layers.BatchNormalization(synchronized=True)
    return keras.Sequential([keras.Input([4]), norm, layers.Dense(1)])


class Linear(keras.Model):
    """One layer, and what the cases below add."""

    def __init__(self, **attributes):
        super().__init__()
        self.inner = keras.Sequential([keras.Input([4]), layers.Dense(1)])
        self.alpha = 1.0
        for name, value in attributes.items():
            setattr(self, name, value)

    def call(self, x):
        return self.inner(x) * self.alpha

    def doubled(self):
        return 2 * self.alpha


class HoldsOptimizers(Linear):
    def __init__(self):
        super().__init__(held={"first": [keras.optimizers.Adam(0.01)]})

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        (optimizer,) = self.held["first"]
        variables = self.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss, "rate": optimizer.learning_rate}


class ShowsAVariable(Linear):
    """A metric of a variable, which changes after the metric's update."""

    def __init__(self):
        super().__init__()
        self.shown = keras.metrics.Mean("shown")
        self.share = self.add_weight(name="share", initializer="ones", trainable=False)

    def train_step(self, data):
        self.shown.update_state(self.share)
        self.share.assign(self.share * 0.5)
        return super().train_step(data)


class LogsTheRate(Linear):
    def train_step(self, data):
        rate = self.optimizer.learning_rate + 0.0
        return {**super().train_step(data), "rate": rate}


SHARE = tf.Variable(0.5)  # of a loss, such as a KL term's, which a callback changes


class DoublesTheShare(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        SHARE.assign(0.5)

    def on_train_batch_end(self, batch, logs=None):
        SHARE.assign(2 * SHARE)


def share_of_error(y, prediction):
    error = keras.ops.mean((y - prediction) ** 2, axis=-1)
    return error * keras.ops.convert_to_tensor(SHARE)


class Halves(keras.callbacks.Callback):
    """Changes weights and the optimizer's state between batches and epochs."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.set_weights([own / 2 for own in self.model.get_weights()])
            self.model.optimizer.iterations.assign(7)

    def on_epoch_end(self, epoch, logs=None):
        kernel = self.model.layers[0].kernel
        kernel.assign(kernel * 0.5)


class RetracesSteps(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.make_train_function(force=True)


def averaging(**options):
    return keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5, **options)


def adam():
    return keras.optimizers.Adam(0.01)


def clipping():
    """An optimizer with a method of its own, which tracing a step must not remove."""
    optimizer = keras.optimizers.SGD(0.1)
    plain = optimizer.apply

    def apply(grads, variables=None):
        plain([tf.clip_by_value(grad, -0.01, 0.01) for grad in grads], variables)

    optimizer.apply = apply
    return optimizer


CASES = {
    "synchronised, compiled by XLA": {
        "make": synchronised,
        "compile": {"jit_compile": True},
    },
    "optimizers in a container": {"make": HoldsOptimizers, "compile": None},
    "scaled losses, a rate in the logs, sharded, compiled by XLA": {
        "make": LogsTheRate,
        "optimizer": lambda: keras.optimizers.LossScaleOptimizer(adam()),
        "variables": "sharded",
        "compile": {"jit_compile": True},
    },
    "a loss that reads a variable, compiled by XLA": {
        "compile": {"loss": share_of_error, "jit_compile": True},
        "callbacks": lambda: [DoublesTheShare()],
        "towers": 3,
    },
    "weights swapped for their averages, sharded": {
        "optimizer": averaging,
        "callbacks": lambda: [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
        "variables": "sharded",
        "towers": 3,
    },
    "averages that replace weights at times, sharded": {
        "optimizer": lambda: averaging(ema_overwrite_frequency=3),
        "variables": "sharded",
        "towers": 3,
    },
    "a callback sets weights": {"callbacks": lambda: [Halves()]},
    "frozen": {"prepare": lambda m: setattr(m, "trainable", False)},
    "an attribute set": {"make": Linear, "prepare": lambda m: setattr(m, "alpha", 0.5)},
    "a metric of a variable": {"make": ShowsAVariable},
    "an optimizer's own method": {
        "optimizer": clipping,
        "fit": {"batch_size": 9},  # steps are traced for 9 rows and for 4
        "callbacks": lambda: [RetracesSteps()],
    },
    "one row's losses added, eagerly": {
        "compile": {
            "loss": keras.losses.MeanSquaredError(reduction="sum"),
            "run_eagerly": True,
        },
        "x": X[:5],
        "y": Y[:5],
        "fit": {"batch_size": 1},
    },
    "a table of positions": {"make": Positions, "x": TOKENS, "towers": 3},
    "a table of positions, sharded": {
        "make": Positions,
        "x": TOKENS,
        "variables": "sharded",
        "towers": 3,
    },
    "towers without rows of characters": {
        "make": characters,
        "x": OF_TOKENS * [1, 2, 3, 4],
        "y": TOKENS[:, :3] % 4 + 1,
        "towers": 3,
        "compile": {"loss": keras.losses.CTC()},
        "fit": {"batch_size": 19},
    },
    "a mean over words, of which rows have unlike numbers": {
        "make": characters,
        "x": OF_TOKENS * [1, 2, 3, 4],
        "y": TOKENS,
        "towers": 4,
        "weights": lambda x, y, sample_weight: tf.reduce_sum(sample_weight),
        "compile": lambda: {
            "loss": keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="mean_with_sample_weight"
            )
        },
        "fit": {"sample_weight": (TOKENS > 1).astype("float32"), "batch_size": 9},
    },
    "losses that are added, beside means": {
        "make": regularized,
        "compile": {"loss": keras.losses.MeanSquaredError(reduction="sum")},
        "fit": {"batch_size": 19},  # 19, 19 and 2
        "callbacks": lambda: [Halves()],  # and validates
        "towers": 3,
    },
    "a loss of weights beside a mean over rows": {
        "make": adding_losses,
        "compile": lambda: {"loss": by_weight()},
        "fit": {"sample_weight": WEIGHTS, "batch_size": 9},
    },
}


def trained(model, case):
    """Compiles and fits a model; returns its weights and history."""
    case.get("prepare", lambda model: None)(model)
    options = case.get("compile", {})
    if options is None:
        model.compile()
    else:
        options = {"loss": "mse", **(options() if callable(options) else options)}
        model.compile(case.get("optimizer", adam)(), **options)
    callbacks = case.get("callbacks", list)()
    x, y = case.get("x", X), case.get("y", Y)
    options = {"batch_size": 10, "epochs": 2, "verbose": 0, "shuffle": False}
    if callbacks:
        options |= {"callbacks": callbacks, "validation_data": (x, y)}
    history = model.fit(x, y, **{**options, **case.get("fit", {})}).history
    return [*model.get_weights(), *(np.array(history[k]) for k in sorted(history))]


@pytest.mark.slow(by_day=["a table of positions", "frozen"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_a_program_does_what_it_does_on_one_device(name):
    case = CASES[name]
    make = case.get("make", dense)
    options = {name: case[name] for name in ("variables", "weights") if name in case}
    many = towers_of(make, case.get("towers", 2), **options)
    # A case's metric object serves both; plain Keras does not reset it at first.
    want = trained(seeded(make)(), case)
    check_near(trained(many, case), want)
    for tower in many.towers[1:]:
        check_near(tower.get_weights(), many.get_weights(), 0.0)


@pytest.mark.slow(by_day=["float", "Variable0"])
@pytest.mark.parametrize("kind", [float, tf.Variable, keras.Variable])
def test_towers_follow_a_learning_rate_that_changes_between_steps(kind):
    def trained(model):
        rate = kind(0.1)
        given = rate if kind is float else lambda: rate
        model.compile(keras.optimizers.Adam(given), "mse")
        for new in (0.01, 0.2, 0.03):
            if kind is float:
                model.optimizer.learning_rate = new
            else:
                rate.assign(new)
            model.train_on_batch(X, Y)
        return model

    want = trained(seeded(dense)()).get_weights()
    for tower in trained(towers_of(dense, 2)).towers:
        check_near(tower.get_weights(), want)


def test_metrics_do_not_count_padding():
    def evaluated(model):
        model.compile("sgd", "mse", metrics=["mae"])
        return model.evaluate(TOKENS, OF_TOKENS, batch_size=10, verbose=0)[1]

    want = evaluated(seeded(masked)())
    np.testing.assert_allclose(evaluated(towers_of(masked, 2)), want, rtol=1e-6)


def test_an_empty_list_of_metrics_adds_nothing_to_the_history():
    model = towers_of(dense, 2)
    model.compile("sgd", "mse", metrics=[])
    assert list(model.fit(X, Y, verbose=0).history) == ["loss"]
    assert list(model.evaluate(X, Y, verbose=0, return_dict=True)) == ["loss"]


def test_towers_draw_random_numbers_of_their_own():
    class Noise(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dropout = layers.Dropout(0.5, seed=1)
            self.generator = tf.random.Generator.from_seed(1)

        def call(self, x):
            shape = tf.shape(x)
            dropped = self.dropout(tf.ones_like(x), training=True)
            return dropped, keras.random.normal(shape) + 0 * self.generator.normal(
                shape
            )

    def make():
        x = keras.Input([64])
        return keras.Model(x, Noise()(x))

    model = TowerModel(make, CPUS[:2])
    keras.utils.clear_session()  # the generator of Keras is to be made
    states = [tower.layers[1].generator.state for tower in model.towers]
    before = [state.numpy() for state in states]
    draws = [model.predict(np.ones([20, 64]), verbose=0) for _ in range(2)]
    for drawn in zip(*draws, strict=True):
        assert len(np.unique(np.concatenate(drawn), axis=0)) == 40
    for state, was in zip(states, before, strict=True):
        assert not np.array_equal(state.numpy(), was)


def test_what_does_not_train_may_be_shared():
    teacher = dense()
    teacher.trainable = False
    norm = layers.Normalization()
    norm.adapt(X)

    def make():
        x = keras.Input([4])
        return keras.Model(x, layers.Dense(1)(norm(x)) + teacher(x))

    model = TowerModel(make, CPUS[:2])
    model.compile(adam(), "mse")
    history = model.fit(X, Y, epochs=3, verbose=0).history["loss"]
    assert history[-1] < history[0]


def test_the_object_answers_as_the_model_does():
    model = TowerModel(lambda: Linear(extra=[1]), CPUS[:2])
    assert model.doubled() == 2 and model.extra == [1]
    functional = TowerModel(dense, CPUS[:2])
    plain = functional.towers[0]
    assert functional.built and functional.inputs is plain.inputs
    assert functional.output_shape == (None, 1)
    assert functional.to_json() == plain.to_json()
    assert keras.Model(functional.inputs, functional.layers[0].output)(X).shape == (
        40,
        3,
    )
    functional.compile(adam(), "mse")
    assert functional.loss == "mse"
    np.testing.assert_allclose(
        functional.compute_loss(X, Y, functional(X)), np.mean((plain(X) - Y) ** 2), 1e-6
    )
    with pytest.raises(NotImplementedError, match=r"of model.towers\[0\]"):
        functional.quantize("int8")
    with pytest.raises(AttributeError, match="nothing_like_it"):
        print(functional.nothing_like_it)


def test_without_devices_all_gpus_have_a_tower(monkeypatch):
    seen = tf.config.get_visible_devices
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{n}", "GPU") for n in "01"]
    own = tf.config.get_logical_device_configuration
    monkeypatch.setattr(
        *(tf.config, "get_visible_devices"),
        lambda kind: gpus if kind == "GPU" else seen(kind),
    )
    monkeypatch.setattr(
        *(tf.config, "get_logical_device_configuration"),
        lambda device: None if device in gpus else own(device),
    )
    assert TowerModel(dense).devices == ["/gpu:0", "/gpu:1"]
    assert TowerModel(dense, devices=1).devices == ["/gpu:0"]
    with pytest.raises(ValueError, match=r"at most 2, the number of GPUs .*; got 3"):
        TowerModel(dense, 3)
    gpus.clear()
    with pytest.raises(ValueError, match=r"devices=None means GPUs, and .* has none"):
        TowerModel(dense)


def test_a_model_without_variables_or_compile_predicts():
    class Doubles(keras.Model):
        def call(self, x):
            return x * 2

    model = TowerModel(Doubles, CPUS[:2])
    np.testing.assert_array_equal(model.predict(X, verbose=0), X * 2)


def with_scalars():
    x = keras.Input([4])
    means = [keras.ops.mean(x), keras.ops.cast(x[0, 0] * 0 + 7, "int32")]
    return keras.Model(x, [layers.Dense(1)(x), *means])


def test_scalars_are_predicted_once_per_batch():
    one, many = with_scalars(), TowerModel(with_scalars, CPUS[:3])
    many.set_weights(one.get_weights())
    for rows in (17, 40):  # batches of 17, 17 and 6 rows, and of 40
        wants, gots = [m.predict(X, batch_size=rows, verbose=0) for m in (one, many)]
        check_near(gots, wants)


@keras.saving.register_keras_serializable("tests")
class Scales(Linear):
    """Has a variable in no layer, and a configuration."""

    def __init__(self, factor=2, **options):
        super().__init__()
        self.factor = factor
        self.shift = self.add_weight(name="shift", initializer="ones")

    def call(self, x):
        return super().call(x) * self.factor + self.shift

    def get_config(self):
        return {"factor": self.factor}


def through_a_file(model, path):
    keras.saving.save_model(model, path / "model.keras")
    return keras.saving.load_model(path / "model.keras")


COPIES = {
    "file": through_a_file,
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
    "deepcopy": lambda model, _: copy.deepcopy(model),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("options", [{}, {"variables": "sharded"}])
@pytest.mark.parametrize("make", [dense, two_outputs, Scales])
def test_what_keras_copies_is_tower_0(make, options, way, tmp_path):
    model = TowerModel(make, CPUS[:2], **options)
    y = [Y, Y] if make is two_outputs else Y
    model.compile(adam(), ["mse"] * 2 if make is two_outputs else "mse")
    model.fit(X, y, verbose=0)
    made = COPIES[way](model, tmp_path)
    assert type(made) is type(model.towers[0])
    tf.nest.map_structure(
        np.testing.assert_array_equal,
        [*made.get_weights(), *(v.numpy() for v in made.optimizer.variables)],
        [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)],
    )
    model.save(tmp_path / "saved.keras")
    saved = keras.saving.load_model(tmp_path / "saved.keras")
    assert made.get_config() == saved.get_config()
    assert made.get_compile_config() == saved.get_compile_config()


def test_tower_0_is_exported_cloned_converted_and_part_of_other_models(tmp_path):
    model = TowerModel(dense, CPUS[:2])
    model.export(tmp_path / "exported")
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    np.testing.assert_allclose(loaded.serve(X), model.predict(X, verbose=0), rtol=1e-6)
    cloned = keras.models.clone_model(model)
    assert type(cloned) is type(model.towers[0])
    assert cloned.count_params() == model.count_params()
    assert isinstance(model, TowerModel) and "TowerModel" in repr(model)
    x = keras.Input([4])
    outer = keras.Model(x, model(x))
    assert outer.layers[1] is model.towers[0]
    np.testing.assert_array_equal(outer(X), model(X))
    made = tf.lite.TFLiteConverter.from_keras_model(model).convert()
    plain = tf.lite.TFLiteConverter.from_keras_model(model.towers[0]).convert()
    found = []
    for content in (made, plain):
        lite = tf.lite.Interpreter(model_content=content)
        [given], [returned] = lite.get_input_details(), lite.get_output_details()
        lite.allocate_tensors()
        lite.set_tensor(given["index"], X[:1])
        lite.invoke()
        found.append(lite.get_tensor(returned["index"]))
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0], model.predict(X[:1], verbose=0), rtol=1e-5)


def test_tensorboard_shows_the_graph_of_the_model(tmp_path):
    def written(model, path):
        board = keras.callbacks.TensorBoard(path, profile_batch=0)
        model.compile(adam(), "mse")
        model.fit(X, Y, verbose=0, callbacks=[board])
        [file] = (path / "train").glob("*")
        events = tf.compat.v1.train.summary_iterator(str(file))
        return {value.tag for event in events for value in event.summary.value}

    many = written(TowerModel(dense, CPUS[:2]), tmp_path / "many")
    assert many == written(dense(), tmp_path / "one")
    assert "keras" in many


class Siamese(Stepping):
    """Takes anchors, positives, negatives and more: Keras has no names for four."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.Sequential(
            [layers.Dense(3, "tanh"), layers.Dense(2, use_bias=False)]
        )
        self.margin = self.add_weight(name="margin", initializer="ones")

    def call(self, inputs):
        anchor, positive, negative = map(self.embedding, inputs[:3])
        return (
            tf.reduce_sum((anchor - positive) ** 2, -1),
            tf.reduce_sum((anchor - negative) ** 2, -1),
        )

    def loss_of(self, data):
        near, far = self(data)
        loss = tf.reduce_mean(tf.maximum(near - far + self.margin, 0.0))
        return loss + tf.reduce_mean(data[3])


@pytest.mark.parametrize("variables", ["replicated", "sharded", "parameter_server"])
@pytest.mark.slow
def test_a_step_of_ones_own_may_take_any_tuple(variables):
    parts = X, X + 0.1, X[::-1], X[:, 0]
    data = tf.data.Dataset.from_tensor_slices(parts).batch(16)
    many = TowerModel(Siamese, CPUS[:3], variables=variables)
    many.compile(adam())
    many.evaluate(data, verbose=0)  # Makes the variables.
    one = Siamese()
    one.compile(adam(), jit_compile=False)
    one.evaluate(data, verbose=0)
    many.set_weights(one.get_weights())
    wants, gots = [m.fit(data, epochs=3, verbose=0).history for m in (one, many)]
    # A loss near 0 is what is left of larger distances.
    np.testing.assert_allclose(gots["loss"], wants["loss"], rtol=2e-6, atol=2e-7)
    for tower in many.towers:
        check_near(tower.get_weights(), one.get_weights())


def test_a_step_that_cannot_be_traced_raises_its_own_error():
    class Fails(Siamese):
        def train_step(self, data):
            return self(data[0])

    model = TowerModel(Fails, CPUS[:2])
    model.compile(adam())
    data = tf.data.Dataset.from_tensor_slices((X, X, X)).batch(16)
    with pytest.raises(Exception, match="Fails"):
        model.fit(data, verbose=0)
