"""The cost of calling a step: a replicated step over scalars, called in every way."""

from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
import training
from racing import Contender, Report, Timing, checked, race

import tw_builders
import tw_core
import tw_reduce

OPTIONS = {"rounds": 31}

v1 = tf.compat.v1
PEER = "Session.make_callable"
DEVICES = ["/cpu:0", "/cpu:1"]
STEPS = 4


def graph_contenders() -> list[Contender]:
    """A session, called in two ways."""
    with tf.Graph().as_default():
        builder = tw_builders.SyncMultiGPUReplicatedBuilder(
            DEVICES, True, partial(tw_reduce.sum_balanced, devices=DEVICES)
        )

        def tower() -> Any:
            w = v1.get_variable("w", initializer=np.float32(1))
            return [(tf.gradients(w * w, w)[0], w)]

        descend = partial(v1.train.GradientDescentOptimizer, 0.25)
        session, train_op, copies = training.session_step(builder, tower, descend)
    run = session.make_callable(train_op)
    peer = contender(PEER, run, lambda: session.run([w for [w] in copies]))
    return [peer, Contender("Session.run", lambda: session.run(train_op))]


def function_contenders() -> list[Contender]:
    """A tf.function and its concrete function."""
    ours = tw_core.towers(DEVICES)
    variables = tw_core.replicate(ours, lambda tower: Scalar())
    optimizers = tw_builders.make_optimizers(
        ours, partial(v1.train.GradientDescentOptimizer, 0.25)
    )

    @tf.function(autograph=False)
    def step() -> None:
        def gradient(tower: Any, own: Any) -> list[Any]:
            with tf.GradientTape() as tape:
                loss = own.w * own.w
            return tape.gradient(loss, [own.w])

        grads = tw_core.map_towers(gradient, ours, variables)
        reduced = tw_reduce.mean(partial(tw_reduce.sum_balanced, devices=DEVICES))(
            grads
        )
        tw_builders.apply_gradients(ours, reduced, variables, optimizers)

    return [
        contender("tf.function", step, lambda: [own.w.numpy() for own in variables]),
        Contender("concrete function", step.get_concrete_function()),
    ]


class Scalar(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(1.0, name="w")


def contender(name: str, run: Any, values: Any) -> Contender:
    """Compares a few steps, which halve each variable, with what they must give."""
    want = [0.5**STEPS] * len(DEVICES)
    return checked(name, run, values, want, steps=STEPS, rtol=1e-7, atol=0.0)


def run_cell(rounds: int) -> list[Timing]:
    """Races the ways of calling."""
    tw_core.use_logical_cpus(len(DEVICES))
    contenders = [*graph_contenders(), *function_contenders()]
    return race("a step of two scalar towers", contenders, peer=PEER, rounds=rounds)


def main(options: Any, report: Report) -> None:
    """Races the ways of calling a step."""
    report.race(PEER, run_cell, options.rounds)
