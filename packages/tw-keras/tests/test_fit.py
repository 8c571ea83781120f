"""``fit`` over towers has the history of one device, whatever the model."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import (
    CPUS,
    FULL,
    KERAS,
    MODELS,
    OPTIONS,
    STEPS,
    check_same,
    check_same_weights,
    data_for,
    fit,
    pair,
    reducing,
    rows_of,
    settings_for,
    trained_pair,
)

from tw_keras import TowerModel

pytestmark = pytest.mark.usefixtures("in_float64")


VARIABLES = ["replicated", "sharded", "parameter_server"]
each_kind = pytest.mark.parametrize("variables", VARIABLES)


# The way of a gradient that is sparse, of statistics, and of a second optimizer, which
# sees what the first has updated, depends on where variables live.
KINDS_OF = {
    "mlp": ["sharded"],
    "embedding": VARIABLES,
    "normalised": VARIABLES,
    "two players": VARIABLES,
    "two outputs": ["parameter_server"],
    "convolutional": ["replicated"],
    "recurrent": ["sharded"],
    "subclassed": ["sharded"],
    "own loss": ["parameter_server"],
}
TRAINED = [
    # With four towers a part of the last batch is empty.
    (name, kind, 4)
    for name in MODELS
    for kind in (VARIABLES if FULL else KINDS_OF[name])
]
TRAINED += [
    (name, kind, num_towers)
    for name in ("mlp", "normalised", "two players")
    for num_towers in (1, 2)
    for kind in (VARIABLES if FULL else [VARIABLES[num_towers % 2 * 2]])
    if FULL or name == "mlp"
]


@pytest.mark.full(
    "mlp-replicated-2",
    "embedding-sharded-4",
    "convolutional-replicated-4",
    "two players-sharded-4",
    "own loss-parameter_server-4",
)
@pytest.mark.parametrize(("name", "variables", "num_towers"), TRAINED)
def test_history_is_that_of_one_device(name, variables, num_towers):
    held = 0 if name == "two players" else 7
    one, many, *histories = trained_pair(
        name, num_towers, held=held, variables=variables
    )
    check_same(*histories)
    check_same_weights(one, many)
    for tower in many.towers:
        trained = zip(tower.trainable_variables, one.trainable_variables, strict=True)
        for own, plain in trained:
            np.testing.assert_allclose(own.numpy(), plain.numpy(), rtol=1e-6, atol=1e-9)


FLAT = {
    "mlp": ["replicated"],
    "embedding": ["sharded"],
    "normalised": ["replicated", "sharded"],
    "two outputs": ["sharded"],
    "convolutional": ["replicated"],
    "recurrent": ["sharded"],
}


@pytest.mark.full("mlp-replicated", "embedding-sharded")
@pytest.mark.parametrize(
    ("name", "variables"), [(name, kind) for name in FLAT for kind in FLAT[name]]
)
def test_flat_variables_change_no_result(name, variables):
    one, many, *histories = trained_pair(
        name, 3, variables=variables, flat_below_bytes=1_000
    )
    check_same(*histories)
    check_same_weights(one, many)
    assert len(many._own.flat.models) == 3


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "clipped": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.1),
    "per variable": lambda: keras.optimizers.RMSprop(0.01, epsilon=1e-3, clipnorm=0.05),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.5), epsilon=1e-3
    ),
    "accumulating": lambda: keras.optimizers.Adam(
        0.01, epsilon=1e-3, gradient_accumulation_steps=2
    ),
    "scaling": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01, epsilon=1e-3), initial_scale=2**8
    ),
}


# These look at all gradients, or skip an update, wherever the variables live.
ACROSS = ["clipped", "accumulating", "scaling"]
OPTIMIZED = [
    (name, kind)
    for number, name in enumerate(OPTIMIZERS)
    for kind in (VARIABLES if FULL or name in ACROSS else [VARIABLES[number % 3]])
]


@pytest.mark.full(
    "momentum-replicated",
    "clipped-parameter_server",
    "per variable-parameter_server",
    "accumulating-sharded",
    "scaling-parameter_server",
)
@pytest.mark.parametrize(("name", "variables"), OPTIMIZED)
def test_optimizers_do_what_they_do_on_one_device(name, variables):
    *_, want, got = trained_pair("mlp", 3, OPTIMIZERS[name], variables=variables)
    check_same(want, got, rtol=1e-7)


def test_moving_averages_of_weights_are_those_of_one_device():
    def averaging():
        return keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5)

    for options in ({}, {"flat_below_bytes": 1_000}, {"variables": "sharded"}):
        one, many = pair("mlp", 3, averaging, **options)
        check_same(fit(one, "mlp"), fit(many, "mlp"))
        for tower in many.towers:  # Keras writes the averages when training ends.
            check_same_weights(one, tower)


def test_towers_follow_callbacks_of_evaluate_and_predict():
    def averaging():
        return keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)

    one, many = pair("mlp", 2, averaging)
    (x, y), results = data_for("mlp"), []
    for model in (one, many):
        fit(model, "mlp", epochs=1)
        model.set_weights([own + 1 for own in model.get_weights()])  # not the averages
        swap = [keras.callbacks.SwapEMAWeights()]
        loss, *_ = model.evaluate(x, y, verbose=0, callbacks=swap)
        zero = keras.callbacks.LambdaCallback()
        zero.on_predict_begin = lambda logs, model=model: model.layers[
            -1
        ].kernel.assign(tf.zeros([900, 3], "float64"))
        predicted = model.predict(x, verbose=0, callbacks=zero)
        results.append((loss, predicted))
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-9)
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-9)
    check_same_weights(*many.towers, rtol=0, atol=0)


@pytest.mark.full("sharded")
@each_kind
def test_schedule_free_adamw_trains_as_keras_does_eagerly(variables):
    if not hasattr(keras.optimizers, "ScheduleFreeAdamW"):
        pytest.skip("This Keras has no ScheduleFreeAdamW")

    def schedule_free():
        return keras.optimizers.ScheduleFreeAdamW(0.1)

    # Compiled, Keras's own fit begins with momenta of 0 in place of the weights.
    one, many = pair("mlp", 3, schedule_free, variables=variables)
    one.run_eagerly = True
    check_same(fit(one, "mlp"), fit(many, "mlp"), rtol=1e-7)
    for tower in many.towers:
        check_same_weights(one, tower)


COMPILED = {
    "steps_per_execution": {"steps_per_execution": STEPS},
    "run_eagerly": {"run_eagerly": True},
    "jit_compile": {"jit_compile": True},
}


COMPILED_KINDS = [
    (name, kind)
    for number, name in enumerate(COMPILED)
    for kind in (VARIABLES if FULL else [VARIABLES[2 - number]])
]


@pytest.mark.parametrize(("name", "variables"), COMPILED_KINDS)
def test_compile_options_change_no_result(name, variables):
    more = tuple(COMPILED[name].items())
    *_, want, got = trained_pair("mlp", 2, compiled=more, variables=variables)
    check_same(want, got)


WEIGHING = {
    "class_weight": {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}},
    "sample_weight": {"sample_weight": np.arange(33) % 5 / 2},
}


@pytest.mark.full("class_weight")
@pytest.mark.parametrize("name", WEIGHING)
def test_rows_may_weigh_unlike(name):
    one, many = pair("mlp", 4)
    check_same(fit(one, "mlp", **WEIGHING[name]), fit(many, "mlp", **WEIGHING[name]))


REDUCTIONS = ["sum_over_batch_size", "mean_with_sample_weight", "sum", "mean"]
REDUCTIONS += ["sum, mean", "mean_with_sample_weight, sum"]  # of two losses


@pytest.mark.full(
    "True-sum", "False-mean_with_sample_weight", "True-mean_with_sample_weight, sum"
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.each_choice
def test_losses_may_be_reduced_as_keras_can(reduction, weighted):
    one, many = pair("two outputs", 4)
    first, _, second = reduction.partition(", ")
    kind = keras.losses.SparseCategoricalCrossentropy
    for model in (one, many):
        loss = {
            "a": reducing(kind, first, from_logits=True),
            "b": reducing(keras.losses.MeanSquaredError, second or first),
        }
        model.compile(keras.optimizers.SGD(0.001), loss, jit_compile=False)
    weights = np.arange(33) % 5 / 2
    given = {"sample_weight": {"a": weights, "b": weights}} if weighted else {}
    check_same(fit(one, "two outputs", **given), fit(many, "two outputs", **given))


def test_tokens_weigh_what_weights_says():
    """The loss is a mean over tokens, of which rows have unlike numbers."""

    class OverTokens(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return (y_pred - tf.cast(y_true, y_pred.dtype)) ** 2

    def make():
        inputs = keras.Input([6], dtype="float64")
        return keras.Model(inputs, keras.layers.Dense(5, dtype="float64")(inputs))

    random = np.random.default_rng(0)
    x, y = random.standard_normal([33, 6]), random.standard_normal([33, 5])
    mask = (random.random([33, 5]) < 0.4).astype(float)
    mask[:, 0] = 1.0

    def count(x, y, sample_weight):
        return tf.reduce_sum(sample_weight)

    one = make()
    many = TowerModel(make, CPUS, weights=count)
    many.set_weights(one.get_weights())
    for model in (one, many):
        loss = reducing(OverTokens, dtype="float64")
        model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
    options = {"batch_size": 10, "epochs": 3, "shuffle": False, "verbose": 0}
    histories = [
        model.fit(x, y, sample_weight=mask, **options).history for model in (one, many)
    ]
    check_same_weights(one, many)
    np.testing.assert_allclose(histories[1]["loss"], histories[0]["loss"], rtol=1e-9)


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = slice(index * 9, index * 9 + 9)
        return self.x[rows], self.y[rows]


def generator(x, y):
    for index in range(3):
        yield x[index * 9 : index * 9 + 9], y[index * 9 : index * 9 + 9]


INPUTS = {
    "tensors": lambda x, y: {"x": tf.constant(x), "y": tf.constant(y)},
    "dataset": lambda x, y: {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(9)},
    "even dataset": lambda x, y: {
        "x": tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
    },
    "PyDataset": lambda x, y: {"x": Batches(x, y)},
    "generator": lambda x, y: {"x": generator(x, y)},
}


@pytest.mark.parametrize("name", INPUTS)
def test_all_kinds_of_input_are_cut(name):
    one, many = pair("mlp", 4)
    histories = []
    for model in (one, many):
        given = INPUTS[name](*data_for("mlp"))
        histories.append(model.fit(**given, shuffle=False, verbose=0).history)
    check_same(*histories)


class CountsCalls(keras.layers.Layer):
    """Has state that does not depend on its input, as a random generator is."""

    def build(self, shape):
        options = {"initializer": "zeros", "dtype": "int64", "trainable": False}
        self.calls = self.add_weight(shape=[], **options)

    def call(self, inputs):
        self.calls.assign_add(1)
        return inputs


def counting():
    dense = [keras.layers.Dense(3, **OPTIONS), CountsCalls(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input([6], dtype="float64"), *dense])


UNKNOWN = [
    ("replicated", 1, {"inline": True}),
    ("replicated", 2, {"inline": False}),
    ("replicated", 4, {}),
    ("replicated", 2, {"flat_below_bytes": 1_000}),
    ("sharded", 2, {}),
    ("sharded", 3, {"flat_below_bytes": 1_000}),
    ("parameter_server", 3, {}),
]


@pytest.mark.parametrize(("variables", "num_towers", "options"), UNKNOWN)
def test_as_many_updates_are_counted_as_batches_of_unknown_length(
    variables, num_towers, options
):
    x = data_for("mlp")[0][:12]
    rows = tf.data.Dataset.from_generator(
        lambda: zip(x, x[:, :1], strict=True),
        output_signature=(
            tf.TensorSpec([6], tf.float64),
            tf.TensorSpec([1], tf.float64),
        ),
    )
    model = TowerModel(counting, CPUS[:num_towers], variables=variables, **options)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(rows.batch(4), epochs=3, verbose=0)
    assert int(model.optimizer.iterations) == 9  # Plain Keras counts 12.
    for tower in model.towers:
        assert int(tower.layers[1].calls) == 9
    state = model._own.states.known(model._own.appliers[0])
    for own in state[1:]:
        assert int(own.variables[0]) == 9


def since_reset(*models):
    """Resets metrics where Keras, before 3.15, does not do so for each batch given.

    To a loss of one output a batch of a static shape then counts by its rows, and any
    other as one, and what is static is not the same over towers.
    """
    for model in models if KERAS < (3, 15) else ():
        model.reset_metrics()


def test_evaluate_predict_and_batches_of_ones_own_are_those_of_one_device():
    one, many = pair("two outputs", 3)
    x, y = data_for("two outputs")
    got, want = [m.evaluate(x, y, batch_size=10, verbose=0) for m in (many, one)]
    np.testing.assert_allclose(got, want, rtol=1e-9)
    for rows in (10, 2):
        batches = [(x[:rows], rows_of(y, rows)), (x[rows : 2 * rows], rows_of(y, rows))]
        for given in batches:
            since_reset(one, many)
            logs = [model.train_on_batch(*given) for model in (many, one)]
            np.testing.assert_allclose(*logs, rtol=1e-9)
        since_reset(one, many)
        tests = [
            model.test_on_batch(x[:rows], rows_of(y, rows)) for model in (many, one)
        ]
        np.testing.assert_allclose(*tests, rtol=1e-9)
    for method in ("predict", "predict_on_batch"):
        rows = {"verbose": 0, "batch_size": 10} if method == "predict" else {}
        own, plain = [getattr(model, method)(x, **rows) for model in (many, one)]
        for output in ("a", "b"):
            np.testing.assert_allclose(own[output], plain[output], rtol=1e-9)
    np.testing.assert_allclose(many(x)["a"], one(x)["a"], rtol=1e-9)


@pytest.mark.full("sharded")
@each_kind
def test_towers_draw_random_numbers_of_their_own(variables):
    masks = []

    def note(mask):
        masks.append(mask)
        return np.int32(0)

    def keep(y_true, y_pred):
        noted = tf.numpy_function(note, [y_pred], tf.int32)
        with tf.control_dependencies([noted]):
            return tf.reduce_mean(y_pred, axis=-1)

    def noisy():
        return keras.Sequential([keras.Input([500]), keras.layers.Dropout(0.5, seed=1)])

    model = TowerModel(noisy, CPUS[:2], variables=variables)
    model.compile(loss=keep)
    model.fit(np.ones([2, 500]), np.ones([2, 500]), verbose=0)
    assert len(masks) == 2
    assert not np.array_equal(*masks)


def test_batches_of_arrays_train_eagerly():
    one, many = pair("mlp", 3, compiled={"run_eagerly": True})
    x, y = data_for("mlp")
    for method in ("train_on_batch", "test_on_batch", "predict_on_batch"):
        given = (x,) if method == "predict_on_batch" else (x, y)
        own, plain = (getattr(model, method)(*given) for model in (many, one))
        np.testing.assert_allclose(own, plain, rtol=1e-9)


def test_layers_inside_of_layers_are_synchronised():
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__(**OPTIONS)
            norm = keras.layers.BatchNormalization
            self.norm = norm(synchronized=True, **OPTIONS)

        def build(self, shape):
            self.norm.build(shape)

        def call(self, inputs, training=None):
            return self.norm(inputs, training=training)

    def make():
        dense = [keras.layers.Dense(n, **OPTIONS) for n in (8, 3)]
        parts = [keras.Input([6], dtype="float64"), dense[0], Block(), dense[1]]
        return keras.Sequential(parts)

    one, many = make(), TowerModel(make, CPUS)
    many.set_weights(one.get_weights())
    for model in (one, many):
        model.compile(**settings_for("mlp"))
    one.jit_compile = False
    check_same(fit(one, "mlp"), fit(many, "mlp"))
