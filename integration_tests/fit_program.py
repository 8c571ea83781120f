"""Trains by Keras's ``fit`` over processes, and goes on from its backup.

    tw-launch --ps 0 --workers 2 --restart group --max-restarts 3 -- \\
        python fit_program.py FOLDER --kill 0:1:0.4

``--kill START:RANK:EPOCH:SECONDS`` has SIGKILL end the process of that rank so long
after it has begun that epoch, or one after it, in that start of the group; the epoch -1
is the beginning of ``fit``. ``--fault WHAT RANK`` is of one rank, too.
Each rank writes its variables, and rank 0 the history. A rank that ``fit`` leaves by
an error or by Ctrl-C saves the model before it ends.
"""

import argparse
import json
import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tw_launch
import tw_ranks
from tw_keras import TowerModel

START = os.environ.get("TW_START", "0")
EPOCHS, BATCHES, ROWS = 8, 5, 8
FAULTS = ("callback", "train step", "step", "interrupt", "interrupt in a callback")


class Faulty(keras.Sequential):
    """A model whose ``train_step`` may fail: as it is traced, or as it runs."""

    fails, fails_at = False, 1 << 30

    def train_step(self, data: Any) -> Any:
        if self.fails:
            raise ValueError("a fault of its own")
        count = self.optimizer.iterations
        check = tf.debugging.assert_less(
            tf.cast(count, tf.int32), self.fails_at, "a fault of its own"
        )
        with tf.control_dependencies([check]):
            data = tf.nest.map_structure(tf.identity, data)
        return super().train_step(data)


class Slowly(keras.callbacks.Callback):
    """Makes batches take a while, and a fault happen in the third epoch."""

    def __init__(self, rank: int, fault: str, kill: "tuple[int, float] | None") -> None:
        super().__init__()
        self._who = f"rank {rank}, start {START}"
        self._fault, self._epoch, self._kill = fault, 0, kill

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        print(f"{self._who}: epoch {epoch}", flush=True)
        self._epoch = epoch
        self.kill_from(epoch)

    def kill_from(self, epoch: int) -> None:
        """Has this process be killed, if it is to be in this epoch."""
        if self._kill is not None and epoch >= self._kill[0]:
            own = (os.getpid(), signal.SIGKILL)
            threading.Timer(self._kill[1], os.kill, own).start()
            self._kill = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.02)
        if (self._epoch, batch) != (2, 3):
            return
        if self._fault == "callback":
            raise ValueError("a fault of its own")
        if self._fault == "interrupt in a callback":
            signal.raise_signal(signal.SIGINT)
        if self._fault == "interrupt":  # While others keep it waiting, or nearly.
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()


def make_model() -> keras.Model:
    """Returns a model without dropout, whose state Keras does not save."""
    layers = keras.layers
    return Faulty(
        [
            *(keras.Input([4]), layers.Dense(8, "tanh")),
            *(layers.BatchNormalization(), layers.Dense(1)),
        ]
    )


def find_kill(kills: list[str], rank: int) -> "tuple[int, float] | None":
    """Returns in which epoch this process is killed, and how long after its begin."""
    for kill in kills:
        when, whom, epoch, after_s = kill.split(":")
        if (when, whom) == (START, str(rank)):
            return int(epoch), float(after_s)
    return None


def train(group: Any, options: argparse.Namespace) -> None:
    keras.utils.set_random_seed(group.rank)
    what, whom = options.fault or ("", "-1")
    fault = what if int(whom) == group.rank else ""
    model = TowerModel(make_model, ["/cpu:0"] * 2, group=group)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    for own in model.towers:
        own.fails = fault == "train step"
        own.fails_at = 12 if fault == "step" else 1 << 30
    backup = keras.callbacks.BackupAndRestore(
        str(options.folder / "backup"),
        save_freq=options.save_freq,
        delete_checkpoint=False,
    )
    random = np.random.default_rng(group.rank)
    x = random.normal(size=(BATCHES * ROWS, 4)).astype("float32")
    slowly = Slowly(group.rank, fault, find_kill(options.kill, group.rank))
    saved = options.folder / "model.keras"
    slowly.kill_from(-1)
    try:
        history = model.fit(
            *(x, x[:, :1], ROWS, options.epochs),
            shuffle=False,
            verbose=0,
            validation_data=(x, x[:, :1]),
            callbacks=[backup, slowly],
        )
    except BaseException:
        model.save(saved)
        print(f"rank {group.rank} has saved", flush=True)
        raise
    model.save(saved)
    if group.rank == 0:
        told = {"epochs": history.epoch, **history.history}
        (options.folder / "history.json").write_text(json.dumps(told))
    # The others' moving averages are their own.
    own = model.variables if group.rank == 0 else model.trainable_variables
    variables = [np.asarray(v) for v in (*own, *model.optimizer.variables)]
    np.savez(options.folder / f"final-{group.rank}.npz", *variables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--save-freq", default="epoch")
    parser.add_argument("--kill", nargs="*", default=[])
    parser.add_argument("--fault", nargs=2)
    parser.add_argument("--place", nargs=3, help="coordinator, rank and size")
    options = parser.parse_args()
    if options.save_freq != "epoch":
        options.save_freq = int(options.save_freq)
    warnings.simplefilter("ignore", tw_launch.ExposedServerWarning)
    # How a job in the background of a script is ended, where SIGINT is ignored.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.place:
        coordinator, rank, size = options.place
        group = tw_ranks.join(coordinator, rank=int(rank), size=int(size))
    else:
        group = tw_ranks.join(timeout_s=30.0)
    train(group, options)
    group.leave()


if __name__ == "__main__":
    main()
