"""Whole epochs in one call, in both modes."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from rlload_regression import LR, REGRESSION, START, descent, regression_rows

from tw_core.testing import CPUS
from tw_rlload import LocalSyncParallelOptimizer, plan_load

v1 = tf.compat.v1


def visits(variables, inputs):
    """A loss whose gradient counts how often each row was trained on, sparsely."""
    return -tf.reduce_sum(tf.gather(variables["seen"], inputs["row"]))


def counting_trainer(make_trainer, num_rows, **options):
    weights = {"seen": np.zeros(num_rows, np.float32)}
    return make_trainer(
        visits, weights, {"row": (np.int32, [])}, opt=descent(1.0), **options
    )


@pytest.mark.parametrize("shuffle", [None, "minibatches", "rows"])
@pytest.mark.parametrize(("devices", "num_rows"), [(1, 23), (2, 23), (3, 6)])
@pytest.mark.each_choice
def test_every_loaded_row_is_trained_on_once_an_epoch(
    make_trainer, shuffle, devices, num_rows
):
    trainer = counting_trainer(make_trainer, num_rows, devices=devices)
    report = trainer.load([np.arange(num_rows)])
    for epochs, total in ((1, 1), (3, 4)):
        trainer.run_epochs(epochs, shuffle, seed=epochs)
        counts = trainer.weights()["seen"] * devices  # the mean over towers
        np.testing.assert_allclose(counts[: report.rows_loaded], total, rtol=1e-6)
        np.testing.assert_array_equal(counts[report.rows_loaded :], 0)


@settings(max_examples=12)
@given(data=st.data())
def test_every_sequence_is_visited_once_whatever_the_batch(data):
    """One graph, many batches: the loop's indices against the rows they reach."""
    trainer = VISITOR
    length = data.draw(st.integers(1, 3))
    sequences = data.draw(st.integers(2, 30))
    rows = np.arange(sequences * length)
    trainer.load(rows, np.arange(sequences))
    shuffle = data.draw(st.sampled_from([None, "minibatches", "rows"]))
    result = trainer.optimizer.run_epochs(trainer.sess, 2, shuffle, seed=0)
    plan = plan_load(len(rows), sequences, num_devices=2, max_per_device_batch_size=5)
    for k, shard in enumerate(plan.shards):
        seen = result.towers[k]
        # Sums of squares tell sets of small numbers apart well enough.
        wanted = sum(i**2 for i in shard)
        np.testing.assert_array_equal(seen["states"].sum(-1), wanted)
        mine = rows[shard.start * length : shard.stop * length]
        np.testing.assert_array_equal(seen["rows"].sum(-1), (mine**2).sum())
        np.testing.assert_array_equal(seen["match"], 1)


class _Visitor:
    """Two towers that tell which rows and states they see, in one session."""

    def __init__(self):
        self.graph = tf.Graph()
        with self.graph.as_default():
            rows = v1.placeholder(tf.int64, [None], "rows")
            states = v1.placeholder(tf.int64, [None], "states")
            self.optimizer = LocalSyncParallelOptimizer(
                descent()(), list(CPUS[:2]), [rows], [states], 5, self.build
            )
            config = v1.ConfigProto(device_count={"CPU": 8})
            self.sess = v1.Session(config=config)
            self.sess.run(v1.global_variables_initializer())

    def build(self, inputs):
        rows, states = inputs
        weight = v1.get_variable("w", initializer=0.0)
        self_ = self

        class Loss:
            _loss = weight * 1.0

            def gradients(self, optimizer):
                return optimizer.compute_gradients(self._loss)

            def extra_compute_grad_fetches(self):
                return self_.scalars(rows, states)

        return Loss()

    def scalars(self, rows, states):
        length = tf.shape(rows)[0] // tf.maximum(tf.shape(states)[0], 1)
        belongs = tf.equal(tf.repeat(states, length), rows // tf.cast(length, tf.int64))
        return {
            "rows": tf.reduce_sum(rows**2),
            "states": tf.reduce_sum(states**2),
            "match": tf.reduce_all(belongs),
        }

    def load(self, rows, states):
        self.optimizer.load_data(self.sess, [rows], [states])


VISITOR = _Visitor()


def regression(variables, inputs):
    error = tf.linalg.matvec(inputs["x"], variables["w"]) - inputs["y"]
    return tf.reduce_mean(tf.square(error)), {"worst": tf.reduce_max(tf.abs(error))}


def regression_trainer(make_trainer, **options):
    return make_trainer(regression, {"w": START}, REGRESSION, opt=descent(), **options)


def test_epochs_in_one_call_are_steps_one_by_one_to_the_bit(make_trainer):
    x, y = regression_rows(50)
    trainer = regression_trainer(make_trainer)
    trainer.load([x, y])
    losses = [
        [float(np.mean([t["worst"] for t in trainer.optimize(i)["towers"]]))]
        for _ in range(3)
        for i in trainer.report.batch_offsets
    ]
    wanted = trainer.weights()["w"]
    again = regression_trainer(make_trainer)
    again.load([x, y])
    result = again.run_epochs(3)
    np.testing.assert_array_equal(again.weights()["w"], wanted)
    worst = np.mean([tower["worst"] for tower in result.towers], 0).reshape(-1, 1)
    np.testing.assert_array_equal(worst, np.float32(losses))


@pytest.mark.parametrize("shuffle", [None, "minibatches"])
def test_epochs_are_what_feeding_the_minibatches_gives_to_the_bit(
    make_trainer, shuffle
):
    x, y = regression_rows(48)
    trainer = regression_trainer(make_trainer, devices=1, maximum=6)
    trainer.load([x, y])
    result = trainer.run_epochs(2, shuffle, seed=3)
    fed, losses = feed_minibatches(x, y, result.order.steps.ravel(), 6)
    np.testing.assert_array_equal(trainer.weights()["w"], fed)
    np.testing.assert_array_equal(result.losses.ravel(), losses)


def feed_minibatches(x, y, steps, size):
    with tf.Graph().as_default(), v1.Session() as sess:
        feeds = [v1.placeholder(tf.float32, [None, 3])]
        feeds.append(v1.placeholder(tf.float32, [None]))
        w = v1.get_variable("w", initializer=START)
        loss, _ = regression({"w": w}, dict(zip("xy", feeds, strict=True)))
        train = descent()().minimize(loss)
        sess.run(v1.global_variables_initializer())
        losses = []
        for step in steps:
            rows = slice(step * size, (step + 1) * size)
            fed = dict(zip(feeds, (x[rows], y[rows]), strict=True))
            losses.append(sess.run([loss, train], fed)[0])
        return sess.run(w), losses


def test_towers_train_as_one_big_batch_does(make_trainer):
    # Whole numbers: sums and means are exact, in whatever order.
    x = np.arange(48, dtype=np.float32).reshape(16, 3) % 5
    y = np.arange(16, dtype=np.float32) % 3
    got = {}
    for devices in (1, 2, 4):
        trainer = regression_trainer(
            make_trainer, devices=devices, maximum=16 // devices
        )
        trainer.load([x, y])
        trainer.run_epochs(1)
        got[devices] = trainer.weights()["w"]
    np.testing.assert_array_equal(got[1], got[2])
    np.testing.assert_array_equal(got[1], got[4])
    error = x @ START - y
    wanted = START - LR * 2 * x.T @ error / 16
    np.testing.assert_allclose(got[1], wanted, rtol=1e-6)


def test_rows_are_shuffled_within_their_device(make_trainer):
    trainer = counting_trainer(make_trainer, 16)
    trainer.load([np.arange(16)])
    order = trainer.run_epochs(1, "rows", seed=5).order
    assert order.sequences.shape == (1, 2, 2, 4)
    assert not np.array_equal(order.sequences[0, :, 0].ravel(), np.arange(8))


def test_losses_come_back_for_every_step_and_tower(make_trainer):
    x, y = regression_rows(50)
    trainer = make_trainer(regression, {"w": START}, REGRESSION, opt=descent(0.0))
    trainer.load([x, y])
    result = trainer.run_epochs(2)
    squares = (x @ START - y) ** 2
    wanted = squares[:48].reshape(2, 6, 4).mean(-1).T
    assert result.losses.dtype == np.float32
    for epoch in range(2):
        np.testing.assert_allclose(result.tower_losses[epoch], wanted, rtol=1e-5)
        np.testing.assert_allclose(result.losses[epoch], wanted.mean(-1), rtol=1e-5)
    np.testing.assert_array_equal(result.fetches["worst"], result.towers[-1]["worst"])
    assert result.fetches["worst"].shape == (2, 6)


def test_the_same_seed_gives_the_same_weights(make_trainer):
    x, y = regression_rows(48)
    got = []
    for seed in (4, 4, 5):
        trainer = regression_trainer(make_trainer)
        trainer.load([x, y])
        trainer.run_epochs(2, "rows", seed=seed)
        got.append(trainer.weights()["w"])
    np.testing.assert_array_equal(got[0], got[1])
    assert not np.array_equal(got[0], got[2])


def test_a_progress_bar_changes_nothing_but_the_number_of_calls(make_trainer, capsys):
    x, y = regression_rows(48)
    got = []
    for progress in (False, True):
        trainer = regression_trainer(make_trainer)
        trainer.load([x, y])
        result = trainer.run_epochs(3, "rows", seed=1, progress=progress)
        got.append((trainer.weights()["w"], result.losses))
    np.testing.assert_array_equal(got[0][0], got[1][0])
    np.testing.assert_array_equal(got[0][1], got[1][1])
    assert "3/3" in capsys.readouterr().err


def test_a_progress_bar_without_tqdm_is_refused(make_trainer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tqdm.auto", None)
    trainer = regression_trainer(make_trainer)
    trainer.load(regression_rows(48))
    with pytest.raises(ImportError, match=r"install it with pip install 'tqdm>=4.66'"):
        trainer.run_epochs(1, progress=True)
