"""Trains two towers with a fault in the step, and draws a timeline that shows it.

    python docs/examples/slow_step.py --fault late-input --out out/slow

The model is large enough for its parts to be seen in the picture; the data are random.
"""

import argparse
import time
from functools import partial
from pathlib import Path

FAULTS = ("none", "wrong-device", "unpacked", "late-input")
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--fault", choices=FAULTS, default="none")
parser.add_argument("--steps", type=int, default=5, help="steps to record")
parser.add_argument("--out", type=Path, default=Path("out/slow"))
if __name__ == "__main__":  # --help and wrong options need no TensorFlow.
    parser.parse_args()

import numpy as np
import tensorflow as tf

import tw_builders
import tw_core
import tw_doctor
import tw_reduce

v1 = tf.compat.v1
LARGE, SMALL, NUM_SMALL, ROWS = 1024, 16, 300, 128
LATE_S = 0.05  # how long a late batch takes


class Model(tf.Module):
    """Three large layers, and many small variables, as in normalisation layers."""

    def __init__(self, last_device):
        super().__init__()
        normal = partial(np.random.default_rng(0).normal, scale=0.02)
        new = [np.float32(normal(size=[LARGE, LARGE])) for _ in range(3)]
        self.large = [tf.Variable(value) for value in new[:2]]
        with tf.device(last_device):
            self.large.append(tf.Variable(new[2]))
        self.small = [tf.Variable(tf.zeros([SMALL])) for _ in range(NUM_SMALL)]


def gradients(tower, model, x):
    for w in model.large:
        x = tf.nn.relu(x @ w)
    shift = tf.add_n([tf.reduce_sum(v) for v in model.small])
    loss = tf.reduce_mean(tf.square(x + shift - 1.0))
    return tf.gradients(loss, model.trainable_variables)


def make_step(fault):
    """Returns the graph's inputs and its training operation."""
    towers = tw_core.towers(tw_core.use_logical_cpus(2))
    devices = [tower.device for tower in towers]
    is_wrong = fault == "wrong-device"  # the last layer of every tower on one device
    xs = [v1.placeholder(tf.float32, [ROWS, LARGE]) for _ in towers]
    models = tw_core.replicate(
        towers, lambda tower: Model(devices[0] if is_wrong else tower.device)
    )
    add = partial(tw_reduce.sum_balanced, devices=devices)
    reducer = tw_reduce.broadcast(add) if fault == "unpacked" else None
    reduce = tw_reduce.mean(reducer or tw_reduce.all_reduce(devices))
    grads = tw_core.map_towers(gradients, towers, models, xs)
    optimizers = tw_builders.make_optimizers(
        towers, lambda: v1.train.MomentumOptimizer(1e-3, 0.9), models
    )
    return xs, tw_builders.apply_gradients(towers, reduce(grads), models, optimizers)


def batches(num_towers, fault):
    random = np.random.default_rng(1)
    while True:
        if fault == "late-input":
            time.sleep(LATE_S)  # a slow disk, a decoder on one thread, remote storage
        yield [random.random([ROWS, LARGE], np.float32) for _ in range(num_towers)]


def record(fault, num_steps=5):
    """Returns the recorder of a few steps with a fault."""
    with tf.Graph().as_default():
        xs, train_op = make_step(fault)
        init = [v1.global_variables_initializer(), v1.local_variables_initializer()]
        session = v1.Session(config=tw_core.session_config())
    data = batches(len(xs), fault)
    with session, tw_doctor.record_steps(num_steps) as steps:
        session.run(init)
        for _ in range(4 * num_steps):
            steps.run(session, train_op, dict(zip(xs, next(data), strict=True)))
    return steps


def main():
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    steps = record(options.fault, options.steps)
    print(steps.summary())
    seconds = [step.seconds for step in steps.steps]
    fastest = seconds.index(min(seconds))  # least disturbed by other programs
    steps.draw(options.out / f"{options.fault}.png", step=fastest)
    steps.write(options.out / f"{options.fault}.json")


if __name__ == "__main__":
    main()
