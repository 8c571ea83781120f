"""The cost of scaling, accumulating and skipping, beside optimizers without them.

Every contender trains the same variables by gradients that are given, so that what
is timed is the optimizer. Before anything is timed, each makes a few updates and
must reach the same variables as the plain optimizer.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from harness import Contender, Report, Timing, race, ratio

import tw_ampopt
import tw_core

v1 = tf.compat.v1
RATE = 0.01
GROUP = 8
SCALE = tw_ampopt.DoublingScale()
PLAIN, OURS = "plain optimizer", "tw_ampopt"


@dataclass(frozen=True)
class Size:
    """Variables of a model."""

    count: int
    floats: int

    def __str__(self) -> str:
        return f"{self.count} variables of {self.floats:,} floats"

    def initial(self) -> list[np.ndarray]:
        return [np.full(self.floats, n % 7, np.float32) for n in range(self.count)]

    def grads(self, tower: int) -> list[np.ndarray]:
        random = np.random.default_rng(tower)
        # Two numbers a gradient: drawing 10 million takes longer than racing.
        return [
            np.resize(random.integers(-8, 9, 97).astype(np.float32), self.floats)
            for _ in range(self.count)
        ]


SIZES = {
    "20x1K": Size(20, 1024),
    "160x1K": Size(160, 1024),
    "600x1K": Size(600, 1024),
    "160x64K": Size(160, 65_536),
}


@dataclass
class Made:
    """A contender, and how to read what it has learnt (tower 0's variables)."""

    contender: Contender
    read: Callable[[], list[np.ndarray]]


class GraphModel:
    """K towers in a session graph, whose losses have the gradients wanted."""

    def __init__(self, size: Size, num_towers: int) -> None:
        self.towers, self.losses = [], []
        for k in range(num_towers):
            with tf.device(f"/cpu:{k}"):
                variables = [tf.Variable(value) for value in size.initial()]
                grads = [tf.Variable(g, trainable=False) for g in size.grads(k)]
                terms = [
                    tf.reduce_sum(v * g) for v, g in zip(variables, grads, strict=True)
                ]
                self.losses.append(tf.add_n(terms))
            self.towers.append(variables)

    def contender(self, name: str, op: tf.Operation, calls: int) -> Made:
        session = v1.Session(config=tw_core.session_config())
        session.run(v1.global_variables_initializer())
        step = session.make_callable(op)

        def run() -> None:
            for _ in range(calls):
                step()

        return Made(Contender(name, run), lambda: session.run(self.towers[0]))


def plain_graph(size: Size, num_towers: int, calls: int) -> Made:
    """A v1 Adam a tower; gradients averaged over towers at every step."""
    with tf.Graph().as_default():
        model = GraphModel(size, num_towers)
        grads = [
            tf.gradients(loss, variables)
            for loss, variables in zip(model.losses, model.towers, strict=True)
        ]
        ops = []
        for k, variables in enumerate(model.towers):
            with tf.device(f"/cpu:{k}"):
                optimizer = v1.train.AdamOptimizer(RATE)
                means = _means(grads)
                ops.append(
                    optimizer.apply_gradients(list(zip(means, variables, strict=True)))
                )
        return model.contender(PLAIN, tf.group(*ops), calls)


def our_graph(size: Size, num_towers: int, calls: int, multiplier: int | None) -> Made:
    with tf.Graph().as_default():
        model = GraphModel(size, num_towers)
        optimizer = tw_ampopt.Optimizer(
            learning_rate=RATE, minibatch_multiplier=multiplier, loss_scale=SCALE
        )
        for loss, variables in zip(model.losses, model.towers, strict=True):
            optimizer.register_gradients(loss, variables)
        return model.contender(OURS, optimizer.apply_updates(), calls)


def tensorflow_graph(size: Size, calls: int) -> Made:
    """TensorFlow's own v1 wrapper, which knows one tower and no accumulation."""
    with tf.Graph().as_default():
        model = GraphModel(size, 1)
        optimizer = v1.mixed_precision.MixedPrecisionLossScaleOptimizer(
            v1.train.AdamOptimizer(RATE), "dynamic"
        )
        pairs = optimizer.compute_gradients(model.losses[0], model.towers[0])
        op = optimizer.apply_gradients(pairs)
        return model.contender("v1 MixedPrecisionLossScaleOptimizer", op, calls)


class FunctionModel:
    """One model's variables and given gradients, for ``tf.function``."""

    def __init__(self, size: Size) -> None:
        self.variables = [keras.Variable(value) for value in size.initial()]
        self.given = [tf.Variable(g, trainable=False) for g in size.grads(0)]

    def grads(self, scale: Callable[[tf.Tensor], tf.Tensor]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            terms = [
                tf.reduce_sum(v.value * g)
                for v, g in zip(self.variables, self.given, strict=True)
            ]
            loss = scale(tf.add_n(terms))
        return tape.gradient(loss, [v.value for v in self.variables])

    def contender(self, name: str, step: Callable[[], Any], calls: int) -> Made:
        function = tf.function(step, autograph=False)
        concrete = function.get_concrete_function()

        def run() -> None:
            for _ in range(calls):
                concrete()

        return Made(Contender(name, run), lambda: [v.numpy() for v in self.variables])


def keras_plain(size: Size, calls: int) -> Made:
    model = FunctionModel(size)
    optimizer = keras.optimizers.Adam(RATE, epsilon=1e-8)
    optimizer.build(model.variables)

    def step() -> None:
        optimizer.apply(model.grads(lambda loss: loss), model.variables)

    return model.contender("Keras optimizer without scaling", step, calls)


def keras_scaled(size: Size, calls: int, multiplier: int | None) -> Made:
    model = FunctionModel(size)
    inner = keras.optimizers.Adam(
        RATE, epsilon=1e-8, gradient_accumulation_steps=multiplier
    )
    optimizer = keras.optimizers.LossScaleOptimizer(inner)
    optimizer.build(model.variables)

    def step() -> None:
        grads = model.grads(optimizer.scale_loss)
        optimizer.apply(grads, model.variables)

    return model.contender("Keras LossScaleOptimizer", step, calls)


def our_keras(size: Size, calls: int, multiplier: int | None) -> Made:
    model = FunctionModel(size)
    optimizer = tw_ampopt.TowerOptimizer(
        model.variables,
        tf_optimizer=keras.optimizers.Adam,
        learning_rate=RATE,
        epsilon=1e-8,
        minibatch_multiplier=multiplier,
        loss_scale=SCALE,
    )

    def step() -> tf.Tensor:
        return optimizer.apply(model.grads(optimizer.apply_loss_scaling))

    return model.contender(OURS, step, calls)


def race_graph(
    size: Size, num_towers: int, multiplier: int | None, rounds: int
) -> list[Timing]:
    """Races in session graphs; with accumulation, a run is a whole group."""
    calls = multiplier or 1
    made = [
        plain_graph(size, num_towers, calls),
        our_graph(size, num_towers, calls, multiplier),
    ]
    if num_towers == 1 and multiplier is None:
        made.append(tensorflow_graph(size, calls))
    reference = plain_graph(size, num_towers, 1)
    check(made[1:], reference, updates=2)
    made_of = f"{size}, {num_towers} tower{'s' * (num_towers > 1)}"
    work = f"graph, {made_of}, {_how(multiplier)}"
    return race(work, [m.contender for m in made], peer=PLAIN, rounds=rounds)


def race_function(size: Size, multiplier: int | None, rounds: int) -> list[Timing]:
    """Races Keras 3 optimizers in ``tf.function``."""
    calls = multiplier or 1
    made = [
        keras_scaled(size, calls, multiplier),
        our_keras(size, calls, multiplier),
        keras_plain(size, calls),
    ]
    check(made[:2], keras_plain(size, 1), updates=2)
    work = f"tf.function, Keras Adam, {size}, {_how(multiplier)}"
    peer = made[0].contender.name
    return race(work, [m.contender for m in made], peer=peer, rounds=rounds)


def check(made: list[Made], reference: Made, *, updates: int) -> None:
    """Makes every contender reach what the reference reaches."""
    for _ in range(updates):
        reference.contender.run()
    want = reference.read()
    for one in made:
        for _ in range(updates):
            one.contender.run()
        for got, value in zip(one.read(), want, strict=True):
            np.testing.assert_allclose(
                got, value, rtol=1e-5, atol=1e-6, err_msg=one.contender.name
            )


def count_operations(size: Size, multiplier: int) -> dict[str, int]:
    """Counts the nodes of whole graphs, function bodies included."""

    def plain(model: GraphModel) -> None:
        loss, variables = model.losses[0], model.towers[0]
        v1.train.AdamOptimizer(RATE).minimize(loss, var_list=variables)

    def ours(model: GraphModel) -> None:
        optimizer = tw_ampopt.Optimizer(
            learning_rate=RATE, minibatch_multiplier=multiplier, loss_scale=SCALE
        )
        optimizer.register_gradients(model.losses[0], model.towers[0])
        optimizer.apply_updates()

    counts = {}
    for name, build in ((PLAIN, plain), (OURS, ours)):
        with tf.Graph().as_default() as graph:
            build(GraphModel(size, 1))
            proto = graph.as_graph_def()
        bodies = sum(len(function.node_def) for function in proto.library.function)
        counts[name] = len(proto.node) + bodies
    return counts


def main(arguments: list[str]) -> None:
    """Races every size; ``--only`` and ``--rounds`` make it shorter."""
    parser = argparse.ArgumentParser(prog="run.py ampopt", description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--towers", nargs="+", type=int, default=[1, 4])
    parser.add_argument(
        *("--only", "-o"), choices=["graph", "function", "count"], default=None
    )
    options = parser.parse_args(arguments)
    tw_core.use_logical_cpus(max(options.towers))
    report = Report("ampopt")
    if options.only in (None, "count"):
        _report_counts(report)
    for name in options.sizes:
        if options.only in (None, "graph"):
            _report_graph(report, SIZES[name], options.towers, options.rounds)
        if options.only in (None, "function"):
            _report_function(report, SIZES[name], options.rounds)
    report.write()


def _report_graph(report: Report, size: Size, towers: list[int], rounds: int) -> None:
    for num_towers in towers:
        for multiplier in (None, GROUP):
            timings = race_graph(size, num_towers, multiplier, rounds)
            report.add(timings, PLAIN)
            measured = ratio(timings, OURS)
            if multiplier is None:
                report.target(timings[0].work, measured, 1.35)
            elif size.floats == 1024:
                report.target(timings[0].work, measured, 1.0)


def _report_function(report: Report, size: Size, rounds: int) -> None:
    for multiplier in (None, GROUP):
        timings = race_function(size, multiplier, rounds)
        report.add(timings, timings[0].name)
        report.target(timings[0].work, ratio(timings, OURS), 1.0)


def _report_counts(report: Report) -> None:
    counts = count_operations(SIZES["600x1K"], GROUP)
    print(f"\ngraph operations, function bodies counted: {counts}")
    measured = counts[OURS] / counts[PLAIN]
    report.target("graph operations, Adam, 600 variables, group of 8", measured, 1.25)


def _means(grads: list[list[Any]]) -> list[Any]:
    if len(grads) == 1:
        return grads[0]
    return [tf.add_n(column) / len(grads) for column in zip(*grads, strict=True)]


def _how(multiplier: int | None) -> str:
    return "no accumulation" if multiplier is None else f"groups of {multiplier}"
