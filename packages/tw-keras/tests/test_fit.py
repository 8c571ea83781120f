"""``fit`` over towers has the history of one device, whatever the model."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import (
    CPUS,
    KERAS,
    MODELS,
    OPTIONS,
    check_same,
    check_same_weights,
    data_for,
    fit,
    pair,
    trained_pair,
)

from tw_keras import TowerModel

pytestmark = pytest.mark.usefixtures("in_float64")


VARIABLES = ["replicated", "sharded", "parameter_server"]
# With four towers a part of the last batch is empty.
TRAINED = [(name, kind, 4) for name in MODELS for kind in VARIABLES]
TRAINED += [
    (name, kind, num_towers)
    for name in ("mlp", "normalised")
    for num_towers in (1, 2)
    for kind in VARIABLES
]


@pytest.mark.slow(by_day=["mlp-replicated-2", "embedding-sharded-4"])
@pytest.mark.parametrize(("name", "variables", "num_towers"), TRAINED)
def test_history_is_that_of_one_device(name, variables, num_towers):
    one, many, *histories = trained_pair(
        name, num_towers, split=0.3, variables=variables
    )
    check_same(*histories)
    check_same_weights(one, many)
    for tower in many.towers:
        trained = zip(tower.trainable_variables, one.trainable_variables, strict=True)
        for own, plain in trained:
            np.testing.assert_allclose(own.numpy(), plain.numpy(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_a_first_call_traces_a_step_once(method):
    class Counts(keras.layers.Layer):
        def call(self, x):
            calls.append(x)
            return x

    calls = []
    model = TowerModel(lambda: keras.Sequential([keras.Input([4]), Counts()]), CPUS[:2])
    model.compile("sgd", "mse")
    calls.clear()
    keras.utils.clear_session()  # No number has been drawn.
    rows = np.ones([8, 4])
    arguments = (rows,) if method == "predict" else (rows, rows)
    getattr(model, method)(*arguments, batch_size=4, verbose=0)
    assert len(calls) == 1


def averaging():
    """Keras writes the averages when training ends."""
    return keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.5)


@pytest.mark.slow
def test_towers_follow_callbacks_of_evaluate_and_predict():
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
    check_same_weights(*many.towers, rtol=0)


REDUCTIONS = ["sum_over_batch_size", "mean_with_sample_weight", "sum", "mean"]
REDUCTIONS += ["sum, mean", "mean_with_sample_weight, sum"]  # of two losses


@pytest.mark.slow
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [True, False])
def test_losses_may_be_reduced_as_keras_can(reduction, weighted):
    one, many = pair("two outputs", 4)
    first, _, second = reduction.partition(", ")
    kind = keras.losses.SparseCategoricalCrossentropy
    for model in (one, many):
        loss = {
            "a": kind(from_logits=True, reduction=first),
            "b": keras.losses.MeanSquaredError(reduction=second or first),
        }
        model.compile(keras.optimizers.SGD(0.001), loss, jit_compile=False)
    weights = np.arange(33) % 5 / 2
    given = {"sample_weight": {"a": weights, "b": weights[::-1]}} if weighted else {}
    check_same(fit(one, "two outputs", **given), fit(many, "two outputs", **given))


def parts(x, y):
    yield from ((x[n : n + 9], y[n : n + 9]) for n in (0, 9, 18))


@pytest.mark.slow
def test_batches_of_known_and_of_unknown_shapes_are_cut():
    one, many = pair("mlp", 4)
    x, y = data_for("mlp")
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    for make in (lambda: rows.batch(8, drop_remainder=True), lambda: parts(x, y)):
        histories = [m.fit(make(), verbose=0).history for m in (one, many)]
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
    ("sharded", 3, {}),
    ("parameter_server", 3, {}),
]


@pytest.mark.slow(by_day=["replicated-4-options2", "sharded-3-options3"])
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
    for own in model._copies.row(0, model.optimizer).place.states[1:]:
        assert int(own.variables[0]) == 9


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_nothing_is_left_that_iterates_over_data_of_unknown_size(method):
    # The garbage collector may wait for TensorFlow, in the midst of a later step.
    model = TowerModel(counting, CPUS[:2])
    model.compile("sgd", "mse")
    rows = tf.data.Dataset.from_tensor_slices((np.ones([8, 6]), np.ones([8, 1])))
    rows = rows.filter(lambda x, y: True).batch(4)
    gc.collect()
    gc.disable()
    try:
        known = iterators()
        getattr(model, method)(rows, verbose=0)
        assert iterators() == known
    finally:
        gc.enable()


def test_an_iterator_over_data_of_unknown_size_does_not_outlive_its_epoch():
    model = TowerModel(counting, CPUS[:2])
    model.compile("sgd", "mse")
    rows = tf.data.Dataset.from_tensor_slices((np.ones([8, 6]), np.ones([8, 1])))
    rows, found = rows.filter(lambda x, y: True).batch(4), []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: found.append(len(iterators() - known))
    )
    gc.collect()
    gc.disable()
    try:
        known = iterators()
        model.fit(rows, epochs=3, callbacks=[note], verbose=0)
    finally:
        gc.enable()
    assert found == [1, 1, 1]


def iterators():
    return {id(one) for one in gc.get_objects() if isinstance(one, tf.data.Iterator)}


def since_reset(*models):
    """Resets metrics where Keras, before 3.15, does not do so for each batch given.

    To a loss of one output a batch of a static shape then counts by its rows, and any
    other as one, and what is static is not the same over towers.
    """
    for model in models if KERAS < (3, 15) else ():
        model.reset_metrics()


@pytest.mark.slow
def test_evaluate_predict_and_batches_of_ones_own_are_those_of_one_device():
    one, many = pair("two outputs", 3)
    x, y = data_for("two outputs")
    # The last batch has one row, which is lent to two towers.
    got, want = [m.evaluate(x, y, batch_size=16, verbose=0) for m in (many, one)]
    np.testing.assert_allclose(got, want, rtol=1e-9)
    for method in ("train_on_batch", "train_on_batch", "test_on_batch"):
        since_reset(one, many)
        rows = {output: of_rows[:2] for output, of_rows in y.items()}
        logs = [getattr(m, method)(x[:2], rows) for m in (many, one)]
        np.testing.assert_allclose(*logs, rtol=1e-9)
    for method in ("predict", "predict_on_batch"):
        rows = {"verbose": 0, "batch_size": 16} if method == "predict" else {}
        own, plain = [getattr(model, method)(x, **rows) for model in (many, one)]
        for output in ("a", "b"):
            np.testing.assert_allclose(own[output], plain[output], rtol=1e-9)
    np.testing.assert_allclose(many(x)["a"], one(x)["a"], rtol=1e-9)
