"""Trains on handwritten digits over processes, and goes on from the last checkpoint.

    tw-launch --ps 0 --workers 3 --restart group --max-restarts 3 -- \\
        python process_program.py keras FOLDER --kill 0:1:7

A checkpoint has the model, the optimizer and the position in the data: rank 0 writes
and reads it, and the others get everything from rank 0. ``--kill START:RANK:STEP`` has
the process of that rank die by SIGKILL some milliseconds after it has begun that step
in that start of the group.
"""

import argparse
import os
import random
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from digits_towers import batch, cross_entropy, get_weights

import tw_launch
import tw_ranks

v1 = tf.compat.v1
SAVE_EVERY = 5


class Program(NamedTuple):
    """A program whose variables are those of rank 0.

    step(images, labels) trains on a batch, and returns the position after it; save()
    writes a checkpoint; read() returns the position and all variables.
    """

    step: Callable[[np.ndarray, np.ndarray], int]
    save: Callable[[], Any]
    read: Callable[[], tuple[int, list[np.ndarray]]]


def keras_program(group: tw_ranks.ProcessGroup, folder: Path) -> Program:
    """A Keras 3 model, trained by a ``tf.function``."""
    keras.utils.set_random_seed(group.rank)
    hidden = keras.layers.Dense(32, "relu")
    model = keras.Sequential([keras.Input([64]), hidden, keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    position = tf.Variable(0, dtype=tf.int64)
    parts = {"model": model, "optimizer": optimizer, "position": position}
    checkpoint = tf.train.Checkpoint(**parts)
    manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=2)
    if group.rank == 0:
        checkpoint.restore(manager.latest_checkpoint)
    everything = [*model.variables, *optimizer.variables, position]
    tw_ranks.broadcast_variables(everything, group=group)
    find_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @group.bounded
    @tf.function(reduce_retracing=True)
    def train(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = find_loss(labels, model(images))
        variables = model.trainable_variables
        rows = tf.cast(tf.shape(images)[0], tf.float32)
        grads = tape.gradient(loss, variables)
        [grads] = tw_ranks.mean_across([grads], group=group, weight=rows)
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return position.assign_add(1)

    return Program(
        lambda images, labels: int(train(tf.constant(images), tf.constant(labels))),
        manager.save,
        lambda: (int(position), [np.asarray(v) for v in everything]),
    )


def session_program(group: tw_ranks.ProcessGroup, folder: Path) -> Program:
    """A graph in a plain session, with TensorFlow 1's Adam and ``Saver``."""
    with tf.Graph().as_default() as graph:
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
    latest = tf.train.latest_checkpoint(str(folder))
    if group.rank == 0 and latest is not None:
        with graph.as_default():
            saver.restore(session, latest)
    session.run(take_over)

    def step(own_images: np.ndarray, own_labels: np.ndarray) -> int:
        return int(session.run(after, {images: own_images, labels: own_labels}))

    def save() -> None:
        with graph.as_default():  # Without it the saver takes itself for an eager one.
            saver.save(session, str(folder / "model"), position)

    return Program(
        step,
        save,
        lambda: (int(session.run(position)), session.run(everything)),
    )


PROGRAMS = {"keras": keras_program, "session": session_program}


def die_soon() -> None:
    """Has SIGKILL end this process at some moment of the step that now begins."""
    later_s = random.uniform(0.0, 0.01)
    threading.Timer(later_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("mode", choices=PROGRAMS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--kill", nargs="*", default=[])
    options = parser.parse_args()
    warnings.simplefilter("ignore", tw_launch.ExposedServerWarning)
    start = os.environ["TW_START"]
    group = tw_ranks.join(timeout_s=30.0)
    program = PROGRAMS[options.mode](group, options.folder)
    position, _ = program.read()
    print(f"rank {group.rank}, start {start}: from step {position}", flush=True)
    while position < options.steps:
        if f"{start}:{group.rank}:{position}" in options.kill:
            die_soon()
        own = [part[group.rank :: group.size] for part in batch(position)]
        position = program.step(*own)
        if group.rank == 0 and position % SAVE_EVERY == 0:
            program.save()
    _, variables = program.read()
    np.savez(options.folder / f"final-{group.rank}.npz", *variables)
    group.leave()


if __name__ == "__main__":
    main()
