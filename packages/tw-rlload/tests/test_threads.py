"""Loads and training in several threads at once, in both modes.

Each test holds one call up where it matters and makes the other one meanwhile.
Imports a private module: no public name lets a test hold up the copying of rows.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import tensorflow as tf

from tw_core import towers
from tw_core.testing import CPUS
from tw_rlload import DeviceBatch, EpochFunction
from tw_rlload._loading import buffers

pytestmark = pytest.mark.timeout(120)
DEADLINE_S = 60


class Gate:
    """Holds up the first who passes, until it is opened."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def hold(self):
        if not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(DEADLINE_S)
        return np.float32(0)


def trainer_of(make_trainer, gate=None, **options):
    """A trainer that sums its rows, and whose steps the gate holds up."""

    def loss_fn(variables, inputs):
        held = tf.constant(0.0)
        if gate is not None:
            held = tf.numpy_function(gate.hold, [], tf.float32)
            held.set_shape([])
        with tf.control_dependencies([held]):
            seen = tf.reduce_sum(tf.identity(inputs["x"]))
        return variables["w"] * seen + held, {"sum": seen}

    return make_trainer(
        loss_fn, {"w": np.float32(0)}, {"x": (np.float32, [])}, **options
    )


@contextmanager
def meanwhile(gate, call, *args):
    """Makes a call in another thread, and gives it when the gate holds it up."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(call, *args)
        try:
            assert gate.reached.wait(DEADLINE_S)
            yield other
        finally:
            gate.opened.set()


def rows(value):
    return [np.full(16, value, np.float32)]


@pytest.fixture
def held_writes(monkeypatch):
    """A gate that holds up the copying of rows."""
    gate, fill = Gate(), buffers.fill

    def held(*args):
        gate.hold()
        fill(*args)

    monkeypatch.setattr(buffers, "fill", held)
    return gate


def test_a_load_is_refused_while_epochs_run_and_they_finish_on_their_rows(
    make_trainer,
):
    gate = Gate()
    trainer = trainer_of(make_trainer, gate)
    trainer.load(rows(1))
    with meanwhile(gate, trainer.run_epochs, 2) as epochs:
        with pytest.raises(RuntimeError, match=r"^run_epochs has not returned yet"):
            trainer.load(rows(2))
        gate.opened.set()
        result = epochs.result(DEADLINE_S)
    for tower in result.towers:
        np.testing.assert_array_equal(tower["sum"], 4)
    assert trainer.report.rows_loaded == 16
    trainer.load(rows(2))
    assert trainer.optimize(0)["sum"] == 8


def test_training_is_refused_while_another_thread_loads(make_trainer, held_writes):
    trainer = trainer_of(make_trainer)
    with meanwhile(held_writes, trainer.load, rows(1)) as load:
        for train in (lambda: trainer.optimize(0), lambda: trainer.run_epochs(1)):
            with pytest.raises(
                RuntimeError, match=r"^load\w* is replacing the batch and has not"
            ):
                train()
        with pytest.raises(RuntimeError, match="one batch loads at a time"):
            trainer.load(rows(2))
        held_writes.opened.set()
        load.result(DEADLINE_S)
    assert trainer.run_epochs(1).fetches["sum"].sum() == 8


def test_one_trainer_makes_one_call_at_a_time(make_trainer):
    gate = Gate()
    trainer = trainer_of(make_trainer, gate)
    trainer.load(rows(1))
    with meanwhile(gate, trainer.optimize, 0) as step:
        for train in (lambda: trainer.optimize(0), lambda: trainer.run_epochs(1)):
            with pytest.raises(
                RuntimeError, match=r"^optimize has not returned yet, and each"
            ):
                train()
        gate.opened.set()
        step.result(DEADLINE_S)
    trainer.run_epochs(1)


def test_the_next_batch_does_not_go_where_epochs_still_run(make_trainer):
    gate = Gate()
    trainer = trainer_of(make_trainer, gate, num_buffers=2)
    trainer.load(rows(1))
    with meanwhile(gate, trainer.run_epochs, 1) as epochs:
        trainer.load_next(rows(2))
        trainer.use_next()
        with pytest.raises(
            RuntimeError,
            match=r"^run_epochs has not returned yet, and",
        ):
            trainer.load_next(rows(3))
        gate.opened.set()
        assert epochs.result(DEADLINE_S).fetches["sum"].sum() == 8
    assert trainer.run_epochs(1).fetches["sum"].sum() == 16


def test_a_batch_is_taken_into_use_once(make_trainer, held_writes):
    trainer = trainer_of(make_trainer, num_buffers=2)
    trainer.load_next(rows(1))
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(trainer.use_next) for _ in range(2)]
        held_writes.opened.set()
        errors = [each.exception(DEADLINE_S) for each in both]
    assert sorted(type(error) for error in errors if error) == [RuntimeError]
    # Where the second came late, the first had done with the load already.
    message = str(next(filter(None, errors)))
    assert "has taken this batch" in message or "No load is under way" in message
    assert trainer.report.rows_loaded == 16


def test_two_functions_may_train_on_one_batch_at_once():
    made = towers(list(CPUS[:1]))
    batch = DeviceBatch(made, {"x": tf.TensorSpec([None])}, max_per_device_batch_size=8)
    gate = Gate()

    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable(0.0)

    def held(model, inputs):
        waited = tf.numpy_function(gate.hold, [], tf.float32)
        waited.set_shape([])
        return model.w * tf.reduce_sum(inputs["x"]) + waited

    def free(model, inputs):
        return model.w * tf.reduce_sum(inputs["x"])

    sgd = tf.compat.v1.train.GradientDescentOptimizer
    slow = EpochFunction(batch, held, [Model()], [sgd(1.0)])
    other = EpochFunction(batch, free, [Model()], [sgd(1.0)])
    batch.load(rows(1))
    with meanwhile(gate, slow.run_epochs, 1) as epochs:
        assert other.run_epochs(1).losses.shape == (1, 2)
        gate.opened.set()
        assert epochs.result(DEADLINE_S).losses.shape == (1, 2)
