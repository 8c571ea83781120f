"""Loading in a thread while training, in both modes."""

import tracemalloc

import numpy as np
import pytest
import tensorflow as tf

v1 = tf.compat.v1
pytestmark = pytest.mark.timeout(120)
COLUMNS = {"x": (np.float32, [64])}
NUM_BATCHES, ROWS = 4, 2000


def loss_fn(variables, inputs):
    error = tf.reduce_mean(inputs["x"], 1) - variables["w"]
    return tf.reduce_mean(tf.square(error)), {"sum": tf.reduce_sum(inputs["x"])}


def trainer_of(make_trainer, **options):
    return make_trainer(
        loss_fn,
        {"w": np.float32(0)},
        COLUMNS,
        maximum=100,
        opt=lambda: v1.train.GradientDescentOptimizer(0.1),
        **options,
    )


def batches():
    """Whole numbers, so that sums are exact."""
    rng = np.random.default_rng(0)
    return [
        rng.integers(0, 10, (ROWS, 64)).astype(np.float32) for _ in range(NUM_BATCHES)
    ]


def test_loading_while_training_gives_what_taking_turns_gives(make_trainer):
    wanted, losses = [], []
    trainer = trainer_of(make_trainer)
    for batch in batches():
        trainer.load([batch])
        losses.append(trainer.run_epochs(3).losses)
        wanted.append(trainer.weights()["w"])
    trainer = trainer_of(make_trainer, num_buffers=2)
    first, *others = batches()
    trainer.load([first])
    for i, batch in enumerate([*others, None]):
        if batch is not None:
            trainer.load_next([batch])
        result = trainer.run_epochs(3)
        np.testing.assert_array_equal(result.losses, losses[i])
        np.testing.assert_array_equal(trainer.weights()["w"], wanted[i])
        total = sum(tower["sum"][0].sum() for tower in result.towers)
        assert total == batches()[i].sum()
        if batch is not None:
            batch_report = trainer.use_next()
            assert batch_report.rows_loaded == ROWS


def test_two_buffers_take_two_batches_and_no_more(make_trainer):
    trainer = trainer_of(make_trainer, num_buffers=2)
    batch = batches()[0]
    tracemalloc.start()
    try:
        trainer.load([batch])
        for _ in range(4):
            trainer.load_next([batch])
            trainer.use_next()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    report = trainer.report
    assert report.bytes_resident == 2 * report.bytes_loaded == 2 * batch.nbytes
    assert 1.9 * batch.nbytes < peak < 2.2 * batch.nbytes
