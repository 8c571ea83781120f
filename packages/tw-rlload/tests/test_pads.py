"""Rows that fill up the last steps: they weigh nothing, in both modes."""

import numpy as np
import pytest
import tensorflow as tf
from rlload_regression import LR, REGRESSION, descent

from tw_rlload import plan_load, weighted_mean


def test_weighted_mean_leaves_out_what_weighs_nothing():
    values_ = tf.constant([1.0, 2.0, 30.0])
    assert float(weighted_mean(values_, [1, 1, 0])) == 1.5
    assert float(weighted_mean(values_, [0, 0, 0])) == 0
    half = weighted_mean(tf.cast(values_, tf.float16), tf.constant([True, False, True]))
    assert half.dtype == tf.float16 and float(half) == 15.5


def sequences_of_step(plan, order, epoch, step):
    """Says which sequences of the batch count in a step, over all towers."""
    size, found = plan.sequences_per_device_step, []
    for k, shard in enumerate(plan.shards):
        first = order.steps[epoch, step] * size
        mine = range(first, first + size)
        if order.sequences is not None:
            mine = order.sequences[epoch, step, k]
        found += [shard[int(i)] for i in mine if i < len(shard)]
    return found


def regression_of_what_counts(variables, inputs, weights):
    """NaN where nothing counts, as the mean of no rows is."""
    error = tf.linalg.matvec(inputs["x"], variables["w"]) - inputs["y"]
    return tf.reduce_sum(weights * error**2) / tf.reduce_sum(weights)


@pytest.mark.slow
def test_a_tower_whose_loss_is_nan_for_want_of_rows_counts_nothing(make_trainer):
    def trained(devices, maximum):
        trainer = make_trainer(
            *(regression_of_what_counts, {"w": np.zeros(3, np.float32)}, REGRESSION),
            opt=descent(),
            remainder="pad",
            devices=devices,
            maximum=maximum,
        )
        random = np.random.default_rng(0)
        x = random.integers(-2, 3, (8, 3)).astype(np.float32)
        y = random.integers(-2, 3, 8).astype(np.float32)
        trainer.load([x, y])
        result = trainer.run_epochs(1)
        return trainer.weights()["w"], result.losses

    wanted, losses = trained(1, 8)
    got, found = trained(5, 8)  # 2, 2, 2, 2 and 0 rows
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    np.testing.assert_allclose(found, losses, rtol=1e-6)


@pytest.mark.parametrize("num_sequences", [3, 5, 11])
@pytest.mark.parametrize("shuffle", [None, "rows", "minibatches"])
def test_pads_are_whole_sequences_with_states(make_trainer, num_sequences, shuffle):
    def loss_fn(variables, inputs, weights):
        states = tf.repeat(inputs["h"], tf.size(weights) // tf.size(inputs["h"]))
        error = variables["w"] * inputs["x"] + states - inputs["y"]
        loss = weighted_mean(tf.square(error), weights)
        return loss, {"weight": tf.reduce_sum(weights)}

    columns = {"x": (np.float32, []), "y": (np.float32, [])}
    trainer = make_trainer(
        *(loss_fn, {"w": np.float32(0.5)}, columns, {"h": (np.float32, [])}),
        opt=descent(),
        remainder="pad",
    )
    x, y, h = np.random.default_rng(0).standard_normal((3, num_sequences, 2))
    h = h[:, 0]
    columns = {"x": x.ravel().astype("f"), "y": y.ravel().astype("f")}
    report = trainer.load(columns, {"h": h.astype("f")})
    assert report.rows_loaded == 2 * num_sequences
    result = trainer.run_epochs(2, shuffle, seed=1)
    plan = plan_load(
        *(2 * num_sequences, num_sequences),
        num_devices=2,
        max_per_device_batch_size=4,
        remainder="pad",
    )
    assert sum(tower["weight"].sum() for tower in result.towers) == 4 * num_sequences
    w = 0.5
    for e, s in np.ndindex(2, plan.steps):
        real = sequences_of_step(plan, result.order, e, s)
        error = w * x[real] + h[real, None] - y[real]
        np.testing.assert_allclose(result.losses[e, s], np.mean(error**2), rtol=1e-4)
        w = w - LR * 2 * np.mean(error * x[real])
    np.testing.assert_allclose(trainer.weights()["w"], w, rtol=1e-4)
