"""Event files of both modes, read back."""

import logging

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.util.event_pb2 import Event

from tw_ampopt import (
    DynamicLossScale,
    Optimizer,
    StatisticsHook,
    StatisticsWriter,
    TowerOptimizer,
)

v1 = tf.compat.v1
SGD = {"tf_optimizer": "tf.train.GradientDescentOptimizer", "learning_rate": 0.5}
TAGS = {
    f"G.main/{name}"
    for name in (
        *("learning_rate", "loss_scaling_log2", "overflow_frequency"),
        *("updates", "skipped_updates", "global_norm"),
    )
}


def events(folder):
    """Returns {step: {tag: value}} of all event files below ``folder``."""
    found = {}
    for path in sorted(folder.glob("events*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = Event.FromString(record.numpy())
            for value in event.summary.value:
                number = (
                    tf.make_ndarray(value.tensor).item()
                    if value.HasField("tensor")
                    else value.simple_value
                )
                found.setdefault(event.step, {})[value.tag] = number
    return found


def run_hooked(folder, grads, **arguments):
    with tf.Graph().as_default():
        optimizer = Optimizer("G/main", loss_scale=DynamicLossScale(), **SGD)
        optimizer.report_mem_usage = arguments.pop("report_mem_usage", False)
        with tf.device("/cpu:0"):
            w = tf.Variable([1.0, 2.0], name="w")
        x = v1.placeholder(tf.float32, [])
        with tf.device(w.device):
            optimizer.register_gradients(tf.reduce_sum(w) * x, [w])
        step = optimizer.apply_updates()
        hook = StatisticsHook(optimizer, str(folder), **arguments)
        with v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
            for grad in grads:
                sess.run(step, {x: grad})


def run_written(folder, grads, every, **arguments):
    w = tf.Variable([1.0, 2.0])
    optimizer = TowerOptimizer(
        [w], name="G/main", loss_scale=DynamicLossScale(), **SGD, **arguments
    )
    writer = StatisticsWriter(optimizer, str(folder))
    step = tf.function(
        lambda x: optimizer.apply([optimizer.apply_loss_scaling(tf.ones(2) * x)])
    )
    for number, grad in enumerate(grads):
        step(tf.constant(grad))
        if number % every == every - 1:
            writer.write()
    if len(grads) % every:
        writer.write()
    writer.close()
    return writer


@pytest.mark.parametrize("mode", ["graph", "function"])
def test_both_modes_write_the_same_numbers_under_the_older_names(tmp_path, mode):
    grads = [1.0, np.inf, 1.0, 1.0, 3.0]
    if mode == "graph":
        run_hooked(tmp_path, grads, every_steps=2)
    else:
        run_written(tmp_path, grads, every=2)
    got = events(tmp_path)
    assert list(got) == [2, 4, 5]
    assert all(set(values) == TAGS for values in got.values())
    rows = {
        step: {t.split("/")[1]: v for t, v in row.items()} for step, row in got.items()
    }
    assert [row["overflow_frequency"] for row in rows.values()] == [0.5, 0.0, 0.0]
    assert [row["loss_scaling_log2"] for row in rows.values()] == [14, 14, 14]
    assert [row["updates"] for row in rows.values()] == [1, 3, 4]
    assert [row["skipped_updates"] for row in rows.values()] == [1, 1, 1]
    np.testing.assert_allclose(rows[5]["global_norm"], np.sqrt(18), rtol=1e-6)
    assert rows[5]["learning_rate"] == 0.5


def test_names_of_bad_variables_are_logged_on_request(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "tw_ampopt"):
        run_hooked(tmp_path, [1.0, np.nan, 1.0], name_nonfinite=True)
    [record] = [r for r in caplog.records if r.name == "tw_ampopt"]
    assert record.getMessage() == "G.main: tower 0: gradients not finite: w:0"


@pytest.mark.parametrize("mode", ["graph", "function"])
def test_memory_is_written_where_the_device_reports_it(tmp_path, mode, monkeypatch):
    def run(folder):
        if mode == "graph":
            run_hooked(folder, [1.0], report_mem_usage=True)
        else:
            run_written(folder, [1.0], every=1, report_mem_usage=True)
        return events(folder)[1]

    def reports(device):
        return {"current": 3 * 2**30, "peak": 2**40}

    def is_silent(device):
        raise ValueError(f"{device} keeps no count")

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", is_silent)
    assert set(run(tmp_path / "silent")) == TAGS
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", reports)
    assert run(tmp_path / "reporting")["G.main/mem_usage_gb"] == 3.0


def test_counts_that_were_reset_start_a_new_interval(tmp_path):
    optimizer = TowerOptimizer([tf.Variable([1.0, 2.0])], name="G/main", **SGD)
    writer = StatisticsWriter(optimizer, str(tmp_path))

    def write_after(*grads):
        for grad in grads:
            optimizer.apply([tf.fill([2], grad)])
        writer.write()

    write_after(1.0, np.nan, 1.0)
    optimizer.reset_optimizer_state()
    write_after(np.nan, 1.0)
    written = events(tmp_path)
    assert list(written) == [3, 2]
    assert written[2]["G.main/overflow_frequency"] == 0.5
    write_after()  # no update was due: the share of all updates stands
    with pytest.raises(RuntimeError, match=r"must be called outside of a tf\.function"):
        tf.function(writer.write)()
    writer.close()
    assert events(tmp_path)[2]["G.main/overflow_frequency"] == 0.5
