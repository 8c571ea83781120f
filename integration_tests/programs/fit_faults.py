"""What ranks do in ``test_fit_faults``: a ``fit`` to which something happens.

At some place of it one rank is killed, stopped or kept busy.
"""

import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from programs.rank_training import dense, seeded
from tw_core.testing import CPUS
from tw_keras import TowerModel

EPOCHS, ROWS, BUSY_S = 60, 24, 23.0
PLACES = (
    *("step", "validation", "epoch's end", "idle", "idle itself", "evaluate"),
    *("alone", "sharded"),
)
HARMS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


class Happens(keras.callbacks.Callback):
    """Does harm at a place of ``fit``; ``tells`` is called just before."""

    def __init__(self, place: str, harm: Any) -> None:
        super().__init__()
        self._place, self._harm, self._epoch, self._batch = place, harm, 0, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._batch = epoch, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        now = self._epoch, batch
        if self._place in ("step", "alone", "sharded") and now == (1, 2):
            self._harm(later_s=random.uniform(0.0, 0.01))
        if self._place == "idle" and now == (1, 4):
            self._harm(later_s=random.uniform(0.0, 0.1))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._place == "idle itself" and self._epoch == 1:
            self._harm(later_s=random.uniform(0.05, 0.1))
        if self._place.startswith("idle"):
            time.sleep(0.1)  # So that a rank without a batch waits.

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._place in ("validation", "evaluate") and batch == 1:
            self._harm(later_s=0.0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._place == "epoch's end" and epoch == 1:
            self._harm(later_s=0.0)


def send(number: int, file: str) -> None:
    """Signals this process, and writes when."""
    Path(file).write_text(str(time.monotonic()))
    os.kill(os.getpid(), number)


def harm_by(number: int, file: str, *, later_s: float) -> None:
    """Signals this process now, or while it goes on."""
    if later_s:
        timer = threading.Timer(later_s, send, (number, file))
        timer.daemon = True
        timer.start()
    else:
        send(number, file)


def batches_of(place: str, *, is_harmed: bool) -> int:
    """Returns how many batches a rank has of an epoch."""
    if not place.startswith("idle"):
        return 6
    return 2 if is_harmed == (place == "idle itself") else 8


def harmed(group: Any, place: str, rank: int, what: str, file: str) -> None:
    """Trains; one rank is harmed at a place."""
    rows = 4 * batches_of(place, is_harmed=group.rank == rank)
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype("float32")
    own_ways = {"alone": {"local_steps": 4}, "sharded": {"variables": "sharded"}}
    way = own_ways.get(place, {})
    model = TowerModel(seeded(dense, 0), CPUS[:1], group=group, **way)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    harm = partial(harm_by, HARMS[what], file)
    own = [Happens(place, harm)] if group.rank == rank else []
    if place.startswith("idle") and not own:
        own = [Happens("idle", lambda later_s: None)]
    if place == "evaluate":
        model.fit(x, x[:, :1], 4, 1, verbose=0)
        while True:
            model.evaluate(x, x[:, :1], 4, verbose=0, callbacks=own)
    validation = None if place.startswith("idle") else (x, x[:, :1])
    model.fit(
        *(x, x[:, :1], 4, EPOCHS),
        verbose=0,
        validation_data=validation,
        callbacks=own,
    )


def busy(group: Any, rank: int) -> int:
    """Trains; one rank fills a buffer for longer than a while."""
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    model = TowerModel(seeded(dense, 0), CPUS[:1], group=group)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    data, validation = (
        rows_slowly(x, is_slow).map(lambda rows: (rows, rows[:, :1]))
        for is_slow in (group.rank == rank, False)
    )
    history = model.fit(data, epochs=3, verbose=0, validation_data=validation)
    return len(history.history["val_loss"])


def rows_slowly(x: np.ndarray, is_slow: bool) -> tf.data.Dataset:
    """Returns batches, of which the first of an epoch takes longer than a while."""

    def generate() -> Any:
        if is_slow:
            time.sleep(BUSY_S)
        yield from x

    spec = tf.TensorSpec(x.shape[1:])
    rows = tf.data.Dataset.from_generator(generate, output_signature=spec)
    return rows.shuffle(8, seed=1).batch(4)
