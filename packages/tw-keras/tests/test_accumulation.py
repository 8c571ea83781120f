"""Keras's accumulation has one device's numbers, and reduces once per update."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import (
    CPUS,
    check_same,
    check_same_weights,
    data_for,
    fit,
    on_one_device,
    over_towers,
    pair,
)

from tw_keras import TowerModel
from tw_reduce import all_reduce

optimizers = keras.optimizers
VARIABLES = ["replicated", "sharded", "parameter_server"]


pytestmark = pytest.mark.usefixtures("in_float64")


def adam(steps=3, **options):
    return optimizers.Adam(
        0.01, epsilon=1e-3, gradient_accumulation_steps=steps, **options
    )


def scaling(**options):
    return optimizers.LossScaleOptimizer(adam(**options), 2**8, dynamic_growth_steps=2)


def averaging():
    return adam(2, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)


def counted():
    """Returns a reducer of two towers, and how often it has run."""
    count, add = tf.Variable(0), all_reduce(CPUS[:2])

    def reduce(grads):
        count.assign_add(1)
        return add(grads)

    return reduce, count


def check_same_optimizers(one, many):
    """Compares all that is saved: slots, counts and accumulators."""
    for own, plain in zip(many.variables, one.variables, strict=True):
        np.testing.assert_allclose(
            own.numpy(), plain.numpy(), rtol=1e-7, atol=1e-9, err_msg=own.path
        )


# Four batches an epoch, of which the last is of three rows: with groups of three, an
# epoch ends within a group.
CASES = {
    "plain": ("mlp", 2, adam, {}),
    "one tower": ("mlp", 1, adam, {}),
    "not inlined": ("mlp", 4, lambda: adam(2, clipnorm=0.05), {"inline": False}),
    "averages": ("mlp", 3, averaging, {}),
    "sharded": ("mlp", 3, lambda: adam(global_clipnorm=0.1), {}),
    "shared": ("mlp", 4, lambda: adam(clipvalue=1e-3), {}),
    "sparse": ("embedding", 3, adam, {}),
    "sparse, sharded": ("embedding", 2, adam, {}),
    "sparse, shared": ("embedding", 2, adam, {}),
    "scaled": ("mlp", 2, scaling, {}),
    "scaled, sharded": ("mlp", 3, scaling, {}),
    "scaled, shared": ("mlp", 2, scaling, {}),
    "static scale": ("mlp", 2, lambda: adam(loss_scale_factor=16.0), {}),
    "synchronised": ("normalised", 2, adam, {}),
}


@pytest.mark.slow(by_day=["plain", "scaled, sharded"])
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_one_device(name):
    model, num_towers, make, options = CASES[name]
    kinds = {"sharded": "sharded", "shared": "parameter_server"}
    options = {**options, "variables": kinds.get(name.split(", ")[-1], "replicated")}
    calls = {"steps_per_execution": 3} if name in ("plain", "scaled, sharded") else {}
    one, many = pair(model, num_towers, make, calls, **options)
    check_same(fit(one, model), fit(many, model), rtol=1e-7)
    check_same_optimizers(one.optimizer, many.optimizer)
    for tower in many.towers:
        for own, plain in zip(tower.weights, one.weights, strict=True):
            np.testing.assert_allclose(own.numpy(), plain.numpy(), 1e-6, 1e-9)


class Looks(keras.callbacks.Callback):
    """Saves what an optimizer has after every batch."""

    def on_train_begin(self, logs=None):
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append([v.numpy() for v in self.model.optimizer.variables])


class AppliesItself(optimizers.Adam):
    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)


@pytest.mark.slow
def test_gradients_are_reduced_once_per_update():
    def run(make, **options):
        reducer, count = counted()
        many = TowerModel(lambda: on_one_device("mlp"), CPUS[:2], reducer=reducer)
        many.compile(make(), keras.losses.SparseCategoricalCrossentropy(True))
        fit(many, "mlp", **options)
        return int(count)

    # Of 12 batches; an epoch ends within a group, whose gradients are added up then.
    assert run(scaling, callbacks=[keras.callbacks.TerminateOnNaN()]) == 4
    assert run(adam, callbacks=[Looks()]) == 12
    own = AppliesItself(0.01, gradient_accumulation_steps=3)
    assert run(lambda: own) == 12


@pytest.mark.slow
@pytest.mark.parametrize("variables", VARIABLES)
def test_callbacks_between_batches_see_the_accumulators_of_one_device(variables):
    one, many = pair("mlp", 3, adam, variables=variables)
    looks = Looks(), Looks()
    fit(one, "mlp", callbacks=[looks[0]])
    fit(many, "mlp", callbacks=[looks[1]])
    for plain, own in zip(looks[0].seen, looks[1].seen, strict=True):
        for a, b in zip(plain, own, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("variables", VARIABLES)
def test_what_is_saved_within_a_group_goes_on_as_on_one_device(variables, tmp_path):
    one, many = pair("mlp", 2, adam, variables=variables)
    want = fit(one, "mlp")
    first = fit(many, "mlp", epochs=1)
    many.save(tmp_path / "model.keras")
    saved = tf.train.Checkpoint(model=many).save(tmp_path / "checkpoint")
    plain = keras.models.load_model(tmp_path / "model.keras")
    check_same(_rest(want), fit(plain, "mlp", epochs=2), rtol=1e-7)
    assert first["loss"][0] == pytest.approx(want["loss"][0])
    check_same(_rest(want), fit(many, "mlp", epochs=2), rtol=1e-7)
    tf.train.Checkpoint(model=many).restore(saved).assert_consumed()
    check_same(_rest(want), fit(many, "mlp", epochs=2), rtol=1e-7)


def _rest(history):
    return {name: values[1:] for name, values in history.items()}


def batches_then_error():
    x, y = data_for("mlp")
    for n in range(2):
        yield x[10 * n : 10 * n + 10], y[10 * n : 10 * n + 10]
    raise KeyError("no more")


@pytest.mark.slow
@pytest.mark.parametrize("variables", VARIABLES)
def test_an_error_within_a_group_loses_no_gradients(variables):
    one, many = pair("mlp", 2, adam, variables=variables)
    with pytest.raises(tf.errors.OpError, match="no more"):
        many.fit(batches_then_error(), verbose=0)
    # Keras's own fit empties its accumulators in the step whose batch is missing.
    x, y = data_for("mlp")
    one.fit(x[:20], y[:20], 10, shuffle=False, verbose=0)
    check_same_optimizers(one.optimizer, many.optimizer)
    check_same(fit(one, "mlp"), fit(many, "mlp"), rtol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("variables", VARIABLES)
def test_steps_without_fit_reduce_each(variables):
    one, many = pair("mlp", 2, adam, variables=variables)
    x, y = data_for("mlp")
    for n in range(5):
        rows = slice(5 * n, 5 * n + 7 - n)
        want = one.train_on_batch(x[rows], y[rows])
        np.testing.assert_allclose(many.train_on_batch(x[rows], y[rows]), want)
        check_same_optimizers(one.optimizer, many.optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("variables", VARIABLES)
@pytest.mark.parametrize("at", [1, 2])
def test_batches_that_overflow_are_skipped_as_on_one_device(variables, at):
    one = on_one_device("mlp", scaling)
    many = over_towers("mlp", 3, one.get_weights(), scaling, variables=variables)
    x, y = data_for("mlp")
    x[10 * at + 9] = np.inf  # The last tower's, within a group and at its end.
    for model in (one, many):
        model.fit(x, y, 10, 2, shuffle=False, verbose=0)
    check_same_optimizers(one.optimizer, many.optimizer)
    check_same_weights(one, many)
    count = one.optimizer.inner_optimizer.iterations
    assert int(one.optimizer._iterations) == 0 < int(count) < 8
