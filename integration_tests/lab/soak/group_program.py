"""The program of every rank of a soak's process group: training on digits."""

import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from lab.soak.telling import RATE, REPORT_EVERY_S, ROWS, WAIT_S, report, start, tell
from programs.digits_towers import Weights, accuracy, cross_entropy, digits

import tw_launch
import tw_ranks

SAVE_EVERY_S = 2.0


class Model(tf.Module):
    """What is trained, and saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = Weights()
        self.tally = tf.Variable(0.0)
        self.step = tf.Variable(0, dtype=tf.int64)


def main() -> None:
    folder, pause_s = start()
    warnings.simplefilter("ignore", tw_launch.ExposedServerWarning)
    group = tw_ranks.join(timeout_s=WAIT_S)
    model = Model()
    saves = tf.train.CheckpointManager(
        tf.train.Checkpoint(model=model), str(folder), max_to_keep=3
    )
    saved = saves.latest_checkpoint
    if group.rank == 0:
        saves.checkpoint.restore(saved)
    tw_ranks.broadcast_variables(model.variables, group=group)
    if saved is not None and int(model.step) < int(saved.rpartition("-")[2]):
        tell("fault", text=f"step {int(model.step)} after {saved}")
    work(group, model, saves, folder, pause_s)
    if group.rank == 0:
        weights = [variable.numpy() for variable in model.weights.all]
        tell("end", step=int(model.step), accuracy=accuracy(*weights))
    else:
        tell("end")
    group.leave()


def work(
    group: tw_ranks.ProcessGroup,
    model: Model,
    saves: Any,
    folder: Path,
    pause_s: float,
) -> None:
    """Trains until rank 0 sees the stop file; it tells the others in the sum."""
    rows, _ = digits()
    random = np.random.default_rng(os.getpid())
    due = {"report": 0.0, "save": time.monotonic() + SAVE_EVERY_S}

    @group.bounded
    @tf.function
    def train(images: Any, labels: Any, stops: Any) -> tf.Tensor:
        variables = [*model.weights.all, model.tally]
        with tf.GradientTape() as tape:
            own = model.tally * (group.rank + 1.0)
            loss = cross_entropy(model.weights.all, images, labels) + own
        grads = [*tape.gradient(loss, variables), stops]
        [[*means, stop]] = tw_ranks.mean_across([grads], group=group)
        for variable, mean in zip(variables, means, strict=True):
            variable.assign_sub(RATE * mean)
        model.step.assign_add(1)
        return stop

    is_over = False
    while not is_over:
        chosen = random.integers(0, len(rows.images), ROWS)
        stops = float(group.rank == 0 and (folder / "stop").exists())
        batch = (rows.images[chosen], rows.labels[chosen], np.float32(stops))
        is_over = bool(train(*map(tf.constant, batch)) > 0)
        time.sleep(pause_s)
        now_s = time.monotonic()
        if now_s >= due["report"]:
            due["report"] = now_s + REPORT_EVERY_S
            report(int(model.step), float(model.tally), group.size)
        if group.rank == 0 and now_s >= due["save"]:
            due["save"] = now_s + SAVE_EVERY_S
            saves.save(checkpoint_number=int(model.step))


if __name__ == "__main__":
    main()
