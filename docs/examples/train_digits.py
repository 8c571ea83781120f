"""Trains a small network on handwritten digits, over several towers.

A tower is a copy of the model on one device. Each computes the gradients of its shard
of a batch; these are reduced and applied. Model and step serve both modes.
"""

from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

import tyro


@dataclass(frozen=True)
class Options:
    # variables: a copy per tower; a copy per tower, updated by one; or one for all
    builder: Literal["replicated", "sharded", "parameter-server"] = "replicated"
    mode: Literal["graph", "function"] = "graph"  # step in a session or a tf.function
    towers: int = 4  # number of towers; with --devices, one per device
    devices: tuple[str, ...] = ()  # devices, e.g. /gpu:0 /gpu:1 (GPUs, else CPUs)
    # function of tw_reduce that adds the gradients of replicated towers
    reducer: Literal["sum_balanced", "sum_round_robin"] = "sum_balanced"
    batch_size: int = 64  # images per step, over all towers
    epochs: int = 30  # passes over the training images
    learning_rate: float = 2e-3  # learning rate of Adam
    seed: int = 1  # seed of the first weights and of the order of the images
    resume: bool = False  # whether to resume from the checkpoint in --out
    out: Path = Path("out/train")  # folder for pictures, figures and checkpoint


if __name__ == "__main__":  # --help and wrong options need no TensorFlow.
    asked = tyro.cli(Options, description=__doc__)

import numpy as np
import tensorflow as tf
from digits_run import Program, Run
from sklearn.datasets import load_digits

import tw_builders
import tw_core
import tw_doctor
import tw_reduce

v1 = tf.compat.v1
FILTERS = (16, 32)


def logits(images):
    x = images
    for i, filters in enumerate(FILTERS, start=1):
        with v1.variable_scope(f"conv{i}"):
            kernel = v1.get_variable("kernel", [3, 3, x.shape[-1], filters])
            bias = v1.get_variable("bias", [filters], initializer=tf.zeros_initializer)
        x = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME") + bias)
    x = tf.reshape(tf.nn.max_pool2d(x, 2, 2, "SAME"), [-1, 4 * 4 * FILTERS[-1]])
    return x @ v1.get_variable("dense", [x.shape[-1], 10])


def train_step(options, towers, policy, reducer, optimizers, images, labels):
    def tower_gradients(tower, images, labels):
        with policy.scope(tower):
            guesses = logits(images)
        loss = v1.losses.sparse_softmax_cross_entropy(labels, guesses)
        variables = policy.trainable_variables(tower)
        return loss, list(zip(tf.gradients(loss, variables), variables))

    shards = tf.split(images, len(towers)), tf.split(labels, len(towers))
    losses, pairs = zip(*tw_core.map_towers(tower_gradients, towers, *shards))
    grads, variables = tw_core.split_grad_list(pairs)
    if options.builder == "parameter-server":
        op = tw_builders.apply_shared_gradients(pairs, optimizers[0])
    elif options.builder == "sharded":
        op = tw_builders.apply_sharded_gradients(towers, grads, variables, *optimizers)
    else:
        means = tw_reduce.mean(reducer)(grads)
        op = tw_builders.apply_gradients(towers, means, variables, optimizers)
    with tf.control_dependencies([op] if op else []):  # a tf.function needs no op
        return tf.reduce_mean(losses)


def training_state(options, towers, policy, optimizers):
    """[K][M] copies, tower 0's variables to save, and those that have its slots."""
    models = [policy.trainable_variables(tower) for tower in towers]
    state = [optimizer.variables() for optimizer in optimizers]
    saved, owners = [*models[0], *state[0]], models[0]
    if options.builder == "sharded":  # the state exists once, with the owners
        return models, saved, tw_builders.owned_variables(towers, models)
    return [[*m, *own] for m, own in zip(models, state)], saved, owners


def graph_program(options, towers, policy, reducer, optimizers):
    with tf.Graph().as_default() as graph:
        tf.random.set_seed(options.seed)
        images = v1.placeholder(tf.float32, [options.batch_size, 8, 8, 1])
        labels = v1.placeholder(tf.int64, [options.batch_size])
        args = options, towers, policy, reducer, optimizers
        loss = train_step(*args, images, labels)
        with v1.variable_scope("", reuse=True):
            pixels = v1.placeholder(tf.float32, [None, 8, 8, 1])
            guesses = tf.argmax(logits(pixels), 1)
        copies, *saved = training_state(options, towers, policy, optimizers)
        copy = tw_core.copy_to_replicas(copies) or tf.no_op()
        init = [v1.global_variables_initializer(), v1.local_variables_initializer()]
        session = v1.Session(config=tw_core.session_config())
        session.run(init)
    step = session.make_callable(loss, [images, labels])
    predict, copy = (
        session.make_callable(guesses, [pixels]),
        session.make_callable(copy),
    )
    placed = tw_core.placement(graph, fetches=[loss])
    return Program(step, predict, copy, *saved, optimizers[0], placed, session)


def function_program(options, towers, policy, reducer, optimizers):
    tf.random.set_seed(options.seed)
    policy = tw_core.VariableStore(policy)

    @tf.function(autograph=False)
    def step(images, labels):
        args = options, towers, policy, reducer, optimizers
        return train_step(*args, images, labels)

    @tf.function(autograph=False)
    def predict(images):
        with policy.scope(towers[0]):
            return tf.argmax(logits(images), 1)

    images = tf.TensorSpec([options.batch_size, 8, 8, 1])
    labels = tf.TensorSpec([options.batch_size], tf.int64)
    graph = step.get_concrete_function(images, labels).graph
    copies, *saved = training_state(options, towers, policy, optimizers)
    everywhere = {id(v): v for v in chain(*copies, saved[0])}.values()
    placed = tw_core.placement(graph, variables=[*everywhere])
    copy = partial(tw_core.copy_to_replicas, copies)
    return Program(step, predict, copy, *saved, optimizers[0], placed, None)


def main(options):
    digits = load_digits()
    pixels = np.float32(digits.images[..., None] / 16)
    train, test = np.split(np.random.default_rng(0).permutation(len(pixels)), [1437])
    run = Run(options, num_images=len(train))
    towers, devices = run.towers, [tower.device for tower in run.towers]
    replicated, shared = (
        options.builder == builder for builder in ("replicated", "parameter-server")
    )
    policy = tw_core.Shared(("/cpu:0",)) if shared else tw_core.Replicated()
    reducer = partial(getattr(tw_reduce, options.reducer), devices=devices)
    owners = towers if replicated else towers[:1]
    optimizers = [v1.train.AdamOptimizer(options.learning_rate) for _ in owners]
    build = graph_program if options.mode == "graph" else function_program
    program = build(options, towers, policy, reducer, optimizers)
    run.describe(program)

    run.restore_if_asked(program)
    program.copy()  # every tower starts from tower 0's variables
    graph = program.session and program.session.graph
    with tw_doctor.record_steps(graph=graph) as steps:
        for batch in run.batches(train):
            with steps.step():
                loss = program.step(pixels[batch], digits.target[batch])
            run.log_loss(loss)
            if run.ends_epoch():
                run.log_guesses(program.predict(pixels[test]), digits.target[test])
    run.finish(program, steps)


if __name__ == "__main__":
    try:
        main(asked)
    except KeyboardInterrupt:  # before the first step, or after the last
        raise SystemExit(130) from None
