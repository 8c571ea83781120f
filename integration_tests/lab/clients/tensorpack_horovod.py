"""tensorpack 0.11's ``HorovodTrainer`` on two processes of ``tw-launch --horovod``.

Each rank takes its own half of the batches of a linear model. After every epoch all
ranks must have the weights that NumPy gets from the whole batches.
"""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # which tensorpack 0.11 takes

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness.processes import succeed

EPOCHS, STEPS, RATE, MOMENTUM, DEADLINE_S = 3, 4, 0.1, 0.5, 300


def main() -> int:
    """Trains on two ranks, and compares; as one of the ranks, trains."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_in is not None:
        train(options.rank_in)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "tw_launch", "--horovod", "-np", "2"]
        program = [sys.executable, "-P", __file__, "--rank-in", folder]
        succeed([*launcher, "--", *program], deadline_s=DEADLINE_S)
        results = [np.load(f"{folder}/{rank}.npy") for rank in range(2)]
    want = expected()
    for rank, got in enumerate(results):
        print(f"rank {rank}: {np.abs(got - want).max():.1e} from NumPy's weights")
        np.testing.assert_allclose(got, want, rtol=1e-4)
    np.testing.assert_array_equal(results[0], results[1])
    return 0


def batches() -> tuple[np.ndarray, np.ndarray]:
    """Returns rows [2, steps, 8, 3] and targets [2, steps, 8] of both ranks."""
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(2, STEPS, 8, 3)).astype(np.float32)
    noise = draw.normal(size=(2, STEPS, 8)).astype(np.float32)
    return rows, rows @ np.float32([1, -2, 3]) + noise


def expected() -> np.ndarray:
    """Returns one process's weights after each epoch, [epochs, 3]."""
    rows, targets = batches()
    weights, speed, values = np.ones(3), np.zeros(3), []
    for _ in range(EPOCHS):
        for step in range(STEPS):
            x, y = rows[:, step].reshape(-1, 3), targets[:, step].reshape(-1)
            speed = MOMENTUM * speed + 2 * x.T @ (x @ weights - y) / len(x)
            weights = weights - RATE * speed
        values.append(weights)
    return np.array(values)


def train(folder: Path) -> None:
    """Trains as one rank, and keeps its weights after each epoch."""
    import tensorflow as tf
    from tensorpack import DataFromList, ModelDesc, QueueInput, RepeatedData
    from tensorpack.callbacks import Callback
    from tensorpack.train import (
        HorovodTrainer,
        TrainConfig,
        launch_train_with_config,
        trainers,
    )

    v1, values = tf.compat.v1, []
    trainers.tf = v1  # The trainer asks TensorFlow for names of TensorFlow 1.

    class Model(ModelDesc):
        def inputs(self):
            return [
                tf.TensorSpec([8, 3], tf.float32, "rows"),
                tf.TensorSpec([8], tf.float32, "targets"),
            ]

        def build_graph(self, rows, targets):
            # A broadcast has to make ranks start alike.
            start = v1.constant_initializer(1.0 + trainer._rank)
            weights = v1.get_variable("weights", [3], initializer=start)
            wrong = tf.linalg.matvec(rows, weights) - targets
            return tf.reduce_mean(wrong**2, name="cost")

        def optimizer(self):
            return v1.train.MomentumOptimizer(RATE, MOMENTUM)

    class Keep(Callback):
        _chief_only = False

        def _setup_graph(self):
            known = {v.op.name: v for v in v1.global_variables()}
            self.weights = known["weights"].read_value()

        def _trigger_epoch(self):
            values.append(self.trainer.sess.run(self.weights))

    trainer = HorovodTrainer(average=True)
    rows, targets = batches()
    own = list(zip(rows[trainer._rank], targets[trainer._rank], strict=True))
    data = QueueInput(RepeatedData(DataFromList(own, shuffle=False), -1))
    config = TrainConfig(
        model=Model(),
        data=data,
        callbacks=[Keep()],
        extra_callbacks=[],
        monitors=[],
        steps_per_epoch=STEPS,
        max_epoch=EPOCHS,
    )
    launch_train_with_config(config, trainer)
    np.save(folder / f"{trainer._rank}.npy", values)


if __name__ == "__main__":
    sys.exit(main())
