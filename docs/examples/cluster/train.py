"""Trains a digit classifier over parameter servers; one program for all tasks.

On one machine:

    tw-launch --ps 1 --workers 2 -- python train.py

Elsewhere, start it with anything that sets TF_CONFIG, such as ``ray_program.py``.
``fit.py`` is for processes without servers.
"""

import argparse
import math
import os
import signal

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch", type=int, default=64, help="rows per replica and step")
parser.add_argument("--checkpoints", help="a directory that all tasks share")
parser.add_argument("--wait-timeout", type=float, default=60.0, help="seconds to wait")
if __name__ == "__main__":  # --help and wrong options need no TensorFlow.
    parser.parse_args()

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tw_launch
import tw_syncrep
from tw_syncrep import SyncReplicasOptimizer, training_session

v1 = tf.compat.v1
TEST_ROWS = 400


def main() -> None:
    options = parser.parse_args()
    for name in ("steps", "batch", "wait_timeout"):
        if not 0 < getattr(options, name) < math.inf:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} must be above 0; got {getattr(options, name)}")
    task = tw_launch.read_tf_config()
    server = tw_launch.start_server(task)
    if task.job == "ps":
        serve()
    train(task, server.target, options)


def serve() -> None:
    # server.join() would not react to signals, and the process would have to be killed.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
    while True:
        signal.pause()


def train(task, target, options) -> None:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    replicas = len(task.replicas)
    random = np.random.default_rng(task.replica_index)
    with tf.Graph().as_default():
        with (
            v1.device(tw_syncrep.device_setter(task)),
            tw_syncrep.pulled_together(task),
        ):
            x = v1.placeholder(tf.float32, [None, 64])
            y = v1.placeholder(tf.int64, [None])
            logits = model(x)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
            )
            is_right = tf.equal(tf.argmax(logits, 1), y)
            hits = tf.reduce_mean(tf.cast(is_right, tf.float32))
            step = v1.train.get_or_create_global_step()
            optimizer = SyncReplicasOptimizer(
                v1.train.AdamOptimizer(0.01),
                replicas,
                wait_timeout_s=options.wait_timeout,
            )
            train_op = optimizer.minimize(loss, global_step=step)
        with training_session(
            target,
            task.is_chief,
            options.checkpoints,
            hooks=[
                optimizer.make_session_run_hook(task.is_chief),
                v1.train.StopAtStepHook(last_step=options.steps),
            ],
            save_checkpoint_steps=50,
            save_checkpoint_secs=None,
        ) as session:
            while not session.should_stop():
                rows = random.integers(0, len(images) - TEST_ROWS, options.batch)
                feed = {x: images[rows], y: labels[rows]}
                _, at, now = session.run([train_op, step, loss], feed)
                if not math.isfinite(now):
                    raise SystemExit(f"the loss before step {at} is {now}")
                if task.is_chief and at % 50 == 0 and not session.should_stop():
                    test = {x: images[-TEST_ROWS:], y: labels[-TEST_ROWS:]}
                    share = session.run(hits, test)
                    print(optimizer.status_line(session))
                    print(f"step {at}: {100 * share:.1f} % of the test rows right")
    print(f"{task.job} {task.index} has ended")


def model(x: tf.Tensor) -> tf.Tensor:
    for number, width in enumerate([64, 64]):
        x = tf.nn.relu(dense(x, width, f"hidden{number}"))
    return dense(x, 10, "logits")


def dense(x: tf.Tensor, width: int, name: str) -> tf.Tensor:
    with v1.variable_scope(name):
        start = v1.glorot_uniform_initializer(seed=0)
        kernel = v1.get_variable("kernel", [x.shape[1], width], initializer=start)
        bias = v1.get_variable("bias", [width], initializer=v1.zeros_initializer())
    return x @ kernel + bias


if __name__ == "__main__":
    main()
