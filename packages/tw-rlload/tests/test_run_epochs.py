"""Whole epochs in one call, in both modes."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from rlload_regression import REGRESSION, START, descent, regression_rows

v1 = tf.compat.v1


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_every_sequence_is_visited_once_whatever_the_batch(make_trainer, devices):
    """One trace, many batches: the loop's indices against the rows they reach."""

    def sums(variables, inputs):
        rows, states = inputs["row"], inputs["state"]
        length = tf.size(rows) // tf.maximum(tf.size(states), 1)
        belongs = tf.equal(tf.repeat(states, length), rows // tf.cast(length, tf.int64))
        return variables["w"] * 1.0, {
            "rows": tf.reduce_sum(rows**2),
            "states": tf.reduce_sum(states**2),
            "match": tf.reduce_all(belongs),
        }

    trainer = make_trainer(
        *(sums, {"w": np.float32(0)}, {"row": (np.int64, [])}),
        *({"state": (np.int64, [])},),
        devices=devices,
        maximum=5,
    )

    @settings(max_examples=12)
    @given(
        st.integers(1, 3),
        st.integers(3, 30),
        st.sampled_from([None, "minibatches", "rows"]),
    )
    def check(length, sequences, shuffle):
        rows = np.arange(sequences * length)
        plan = trainer.load([rows], [np.arange(sequences)])
        result = trainer.run_epochs(2, shuffle, seed=0)
        for k, shard in enumerate(plan.shards):
            seen = result.towers[k]
            # Sums of squares tell sets of small numbers apart well enough.
            wanted = sum(i**2 for i in shard)
            np.testing.assert_array_equal(seen["states"].sum(-1), wanted)
            mine = rows[shard.start * length : shard.stop * length]
            np.testing.assert_array_equal(seen["rows"].sum(-1), (mine**2).sum())
            np.testing.assert_array_equal(seen["match"], 1)

    check()


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
    np.testing.assert_array_equal(result.fetches["worst"], result.towers[-1]["worst"])
    assert result.losses.dtype == np.float32
    means = result.tower_losses.mean(axis=-1)
    np.testing.assert_allclose(result.losses, means, rtol=1e-6)


def test_a_progress_bar_changes_nothing_but_the_number_of_calls(make_trainer, capsys):
    x, y = regression_rows(48)
    got = []
    for seed, progress in ((1, False), (1, True), (2, False)):
        trainer = regression_trainer(make_trainer)
        trainer.load([x, y])
        result = trainer.run_epochs(3, "rows", seed=seed, progress=progress)
        got.append((trainer.weights()["w"], result.losses))
    for plain, barred, seeded in zip(*got, strict=True):
        np.testing.assert_array_equal(barred, plain)
        assert not np.array_equal(seeded, plain)
    assert "3/3" in capsys.readouterr().err


def test_a_progress_bar_without_tqdm_is_refused(make_trainer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tqdm.auto", None)
    trainer = regression_trainer(make_trainer)
    trainer.load(regression_rows(48))
    with pytest.raises(ImportError, match=r"install it with pip install 'tqdm>=4.66'"):
        trainer.run_epochs(1, progress=True)
