"""Trains over processes, and resumes from the last checkpoint.

    tw-launch -n 2 --restart group --max-restarts 3 -- \\
        python -m programs.restart_program fit FOLDER --kill 0:1:2:0.4

It trains with Keras's ``fit`` and a backup ("sharded": with the optimizer's state in
shards), or handwritten digits in a "session" whose checkpoint rank 0 writes and reads;
the others receive everything from rank 0.
``--kill START:RANK:NUMBER:SECONDS`` sends SIGKILL to that rank that many seconds after
it has begun that epoch (of ``fit``; -1 is its beginning) or step, or a later one, in
that start of the group. ``--fault WHAT RANK`` also affects one rank, of ``fit``. Each
rank writes its variables, and rank 0 the history of ``fit``. If ``fit`` ends with an
error or Ctrl-C, a rank saves the model before it exits.
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
from programs.digits_towers import batch, cross_entropy, get_weights
from tw_keras import TowerModel

v1 = tf.compat.v1
START = os.environ.get("TW_START", "0")
EPOCHS, BATCHES, ROWS = 8, 5, 8
STEPS, SAVE_EVERY = 24, 5
FAULTS = ("callback", "train step", "step", "interrupt", "interrupt in a callback")


class Progress:
    """Tells what a rank begins, and has its process be killed where it is to be."""

    def __init__(self, rank: int, kills: list[str]) -> None:
        self._who, self._kill = f"rank {rank}, start {START}", (1 << 30, 0.0)
        for kill in kills:
            when, whom, number, after_s = kill.split(":")
            if (when, whom) == (START, str(rank)):
                self._kill = int(number), float(after_s)

    def tell(self, what: str, number: int) -> None:
        print(f"{self._who}: {what} {number}", flush=True)

    def begin(self, number: int) -> None:
        if number >= self._kill[0]:
            own = (os.getpid(), signal.SIGKILL)
            threading.Timer(self._kill[1], os.kill, own).start()
            self._kill = (1 << 30, 0.0)


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

    def __init__(self, fault: str, progress: Progress) -> None:
        super().__init__()
        self._fault, self._progress, self._epoch = fault, progress, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._progress.tell("epoch", epoch)
        self._progress.begin(epoch)
        self._epoch = epoch

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
    hidden = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization()]
    return Faulty([keras.Input([4]), *hidden, keras.layers.Dense(1)])


def fit(group: Any, options: argparse.Namespace, progress: Progress) -> list[Any]:
    """Trains by ``fit``; returns the variables."""
    keras.utils.set_random_seed(group.rank)
    what, whom = options.fault or ("", "-1")
    fault = what if int(whom) == group.rank else ""
    kind = "sharded" if options.mode == "sharded" else "replicated"
    model = TowerModel(make_model, ["/cpu:0"] * 2, group=group, variables=kind)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    for own in model.towers:
        own.fails = fault == "train step"
        own.fails_at = 12 if fault == "step" else 1 << 30
    frequency = options.save_freq if options.save_freq == "epoch" else 2
    backup = keras.callbacks.BackupAndRestore(
        str(options.folder / "backup"), save_freq=frequency, delete_checkpoint=False
    )
    random = np.random.default_rng(group.rank)
    x = random.normal(size=(BATCHES * ROWS, 4)).astype("float32")
    saved = options.folder / "model.keras"
    progress.begin(-1)
    try:
        history = model.fit(
            *(x, x[:, :1], ROWS, options.epochs),
            shuffle=False,
            verbose=0,
            validation_data=(x, x[:, :1]),
            callbacks=[backup, Slowly(fault, progress)],
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
    return [*own, *model.optimizer.variables]


def in_session(
    group: Any, options: argparse.Namespace, progress: Progress
) -> list[Any]:
    """Trains in a plain session, with TensorFlow 1's Adam and ``Saver``."""
    with tf.Graph().as_default():
        images = v1.placeholder(tf.float32, [None, 64])
        labels = v1.placeholder(tf.int64, [None])
        weights = get_weights()
        position = v1.train.get_or_create_global_step()
        optimizer = v1.train.AdamOptimizer(0.01)
        pairs = optimizer.compute_gradients(cross_entropy(weights, images, labels))
        rows = tf.cast(tf.shape(images)[0], tf.float32)
        [grads] = tw_ranks.mean_across(
            [[grad for grad, _ in pairs]], group=group, weight=rows
        )
        train = optimizer.apply_gradients(
            zip(grads, weights, strict=True), global_step=position
        )
        with tf.control_dependencies([train]):
            after = position.read_value()
        everything = v1.global_variables()
        take_over = tw_ranks.broadcast_variables(everything, group=group)
        saver = v1.train.Saver(max_to_keep=2)
        session = v1.Session()
        session.run(v1.global_variables_initializer())
        latest = tf.train.latest_checkpoint(str(options.folder))
        if group.rank == 0 and latest is not None:
            saver.restore(session, latest)
        session.run(take_over)
        step = int(session.run(position))
        progress.tell("step", step)
        while step < STEPS:
            progress.begin(step)
            x, y = (part[group.rank :: group.size] for part in batch(step))
            step = int(session.run(after, {images: x, labels: y}))
            if group.rank == 0 and step % SAVE_EVERY == 0:
                saver.save(session, str(options.folder / "model"), position)
        return list(session.run(everything))


MODES = {"fit": fit, "sharded": fit, "session": in_session}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--save-freq", choices=["epoch", "2"], default="epoch")
    parser.add_argument("--kill", nargs="*", default=[])
    parser.add_argument("--fault", nargs=2)
    parser.add_argument("--place", nargs=3, help="coordinator, rank and size")
    options = parser.parse_args()
    warnings.simplefilter("ignore", tw_launch.ExposedServerWarning)
    # How a job in the background of a script is ended, where SIGINT is ignored.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.place:
        coordinator, rank, size = options.place
        group = tw_ranks.join(coordinator, rank=int(rank), size=int(size))
    else:
        group = tw_ranks.join(timeout_s=30.0)
    progress = Progress(group.rank, options.kill)
    variables = MODES[options.mode](group, options, progress)
    final = options.folder / f"final-{group.rank}.npz"
    np.savez(final, *(np.asarray(v) for v in variables))
    group.leave()


if __name__ == "__main__":
    main()
