"""The cost of scaling, accumulating and skipping, compared with plain optimizers.

Every contender trains the same variables with given gradients, so that only the
optimizer is timed. Before that, each makes a few updates and must reach the same
variables as the plain optimizer.

The model's loss is the sum of every variable times a constant, so that the gradients
are those constants.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from racing import Contender, Report, checked, race
from training import cpus, packed_sum

import tw_ampopt
import tw_core
import tw_reduce

OPTIONS = {
    "rounds": 21,
    "sizes": "ampopt.SIZES",
    "towers": [1, 4],
    "groups": [1, 8],
    "only": {"choices": ("graph", "function", "count", "weights")},
}

GROUP = 8
CHECKED_UPDATES = 2
RACE_S = 8.0  # of a cell, in which there are at least so many rounds:
FEWEST_ROUNDS = 5
v1 = tf.compat.v1
RATE = 0.01
SCALE = tw_ampopt.DynamicLossScale()
PLAIN, OURS, WEIGHED = "plain optimizer", "tw_ampopt", "tw_ampopt with weights"


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
    """A contender."""

    contender: Contender
    step: Callable[[], Any]  # takes in one micro-batch
    read: Callable[[], list[np.ndarray]]  # gives tower 0's variables


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
        contender = Contender(name, partial(_repeat, step, calls))
        return Made(contender, step, lambda: session.run(self.towers[0]))


def plain_graph(size: Size, num_towers: int, calls: int) -> Made:
    """A v1 Adam a tower, and tw-reduce's reducer for many small variables."""
    with tf.Graph().as_default():
        model = GraphModel(size, num_towers)
        grads = [
            tf.gradients(loss, variables)
            for loss, variables in zip(model.losses, model.towers, strict=True)
        ]
        if num_towers > 1:
            grads = tw_reduce.mean(packed_sum(cpus(num_towers)))(grads)
        ops = []
        for k, pairs in enumerate(zip(grads, model.towers, strict=True)):
            with tf.device(f"/cpu:{k}"):
                optimizer = v1.train.AdamOptimizer(RATE)
                ops.append(optimizer.apply_gradients(list(zip(*pairs, strict=True))))
        return model.contender(PLAIN, tf.group(*ops), calls)


def our_graph(
    size: Size,
    num_towers: int,
    calls: int,
    multiplier: int | None,
    *,
    weighs: bool = False,
) -> Made:
    """Ours; with weights those are 3, 4, ... rows, which only the run knows."""
    with tf.Graph().as_default():
        model = GraphModel(size, num_towers)
        optimizer = our_optimizer(multiplier)
        for k, (loss, own) in enumerate(zip(model.losses, model.towers, strict=True)):
            rows = v1.placeholder_with_default(3 + k, []) if weighs else None
            optimizer.register_gradients(loss, own, weight=rows)
        name = WEIGHED if weighs else OURS
        return model.contender(name, optimizer.apply_updates(), calls)


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
        concrete = tf.function(step, autograph=False).get_concrete_function()
        contender = Contender(name, partial(_repeat, concrete, calls))
        return Made(contender, concrete, lambda: [v.numpy() for v in self.variables])


def their_keras(
    size: Size, calls: int, multiplier: int | None = None, *, scaled: bool
) -> Made:
    model = FunctionModel(size)
    optimizer = keras.optimizers.Adam(
        RATE, epsilon=1e-8, gradient_accumulation_steps=multiplier
    )
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(model.variables)
    scale = optimizer.scale_loss if scaled else lambda loss: loss

    def step() -> None:
        optimizer.apply(model.grads(scale), model.variables)

    own = "LossScaleOptimizer" if scaled else "optimizer without scaling"
    return model.contender(f"Keras {own}", step, calls)


def our_keras(size: Size, calls: int, multiplier: int | None) -> Made:
    model = FunctionModel(size)
    optimizer = tw_ampopt.TowerOptimizer(
        model.variables,
        tf_optimizer=keras.optimizers.Adam,
        learning_rate=RATE,
        epsilon=1e-8,
        accumulation_steps=multiplier,
        loss_scale=SCALE,
    )

    def step() -> tf.Tensor:
        return optimizer.apply(model.grads(optimizer.apply_loss_scaling))

    return model.contender(OURS, step, calls)


def count_operations(size: Size, multiplier: int) -> dict[str, int]:
    """Counts the nodes of whole graphs, function bodies included."""
    counts = {}
    for name in (PLAIN, OURS):
        with tf.Graph().as_default() as graph:
            model = GraphModel(size, 1)
            [loss], [variables] = model.losses, model.towers
            if name == PLAIN:
                v1.train.AdamOptimizer(RATE).minimize(loss, var_list=variables)
            else:
                optimizer = our_optimizer(multiplier)
                optimizer.register_gradients(loss, variables)
                optimizer.apply_updates()
            proto = graph.as_graph_def()
        bodies = sum(len(function.node_def) for function in proto.library.function)
        counts[name] = len(proto.node) + bodies
    return counts


def our_optimizer(multiplier: int | None) -> tw_ampopt.Optimizer:
    return tw_ampopt.Optimizer(
        learning_rate=RATE, minibatch_multiplier=multiplier, loss_scale=SCALE
    )


def _repeat(step: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        step()


def graph_cell(size: Size, num_towers: int, multiplier: int | None) -> list[Made]:
    """Makes contenders in session graphs; with accumulation, a run is a whole group."""
    calls = multiplier or 1
    made = [
        plain_graph(size, num_towers, calls),
        our_graph(size, num_towers, calls, multiplier),
    ]
    if num_towers == 1 and multiplier is None:
        made.append(tensorflow_graph(size, calls))
    check(made[1:], made[0])
    return made


def weights_cell(size: Size, num_towers: int, multiplier: int | None) -> list[Made]:
    """Makes ours with and without weights, in session graphs."""
    options = (size, num_towers, multiplier or 1, multiplier)
    return [our_graph(*options), our_graph(*options, weighs=True)]


def function_cell(size: Size, _: int, multiplier: int | None) -> list[Made]:
    """Makes Keras 3 optimizers in ``tf.function``."""
    calls = multiplier or 1
    made = [
        their_keras(size, calls, multiplier, scaled=True),
        our_keras(size, calls, multiplier),
        their_keras(size, calls, scaled=False),
    ]
    check(made[:2], made[2])
    return made


CELLS = {"graph": graph_cell, "weights": weights_cell, "function": function_cell}


def check(made: list[Made], plain: Made) -> None:
    """Makes every contender reach by runs what ``plain`` reaches by steps."""
    for _ in range(CHECKED_UPDATES):
        plain.step()
    want, within = plain.read(), {"rtol": 1e-5, "atol": 1e-6}
    for one in made:
        name, run = one.contender.name, one.contender.run
        checked(name, run, one.read, want, steps=CHECKED_UPDATES, **within)


def main(options: Any, report: Report) -> None:
    """Races every cell, or those that the options name, with its first contender."""
    tw_core.use_logical_cpus(max(options.towers))
    multipliers = [None if count == 1 else count for count in options.groups]
    if options.only in (None, "count"):
        _report_counts(report)
    for name, multiplier, kind in product(options.sizes, multipliers, CELLS):
        if options.only in (None, kind):
            for towers in options.towers if kind != "function" else [1]:
                _race(report, kind, SIZES[name], towers, multiplier, options.rounds)


def _race(
    report: Report,
    kind: str,
    size: Size,
    towers: int,
    multiplier: int | None,
    rounds: int,
) -> None:
    made = CELLS[kind](size, towers, multiplier)
    start = time.perf_counter()
    for one in made:
        one.contender.run()
    # A turn runs everybody twice; large cells have fewer of them.
    affordable = int(RACE_S / (2 * (time.perf_counter() - start)))
    rounds = max(min(FEWEST_ROUNDS, rounds), min(affordable, rounds))
    made_of = f"{kind}, {size}, {towers} tower{'s' * (towers > 1)}"
    if kind == "function":
        made_of = f"tf.function, Keras Adam, {size}"
    groups = f"groups of {multiplier}" if multiplier else "no accumulation"
    peer, contenders = made[0].contender.name, [one.contender for one in made]
    timings = race(f"{made_of}, {groups}", contenders, peer=peer, rounds=rounds)
    report.add(timings, peer)
    is_small = size.floats == SIZES["20x1K"].floats
    if kind == "function" or (kind == "graph" and multiplier and is_small):
        report.compare(timings, OURS, peer, 1.0)
    elif kind == "graph" and not multiplier:
        report.compare(timings, OURS, peer, 1.35)


def _report_counts(report: Report) -> None:
    counts = count_operations(SIZES["600x1K"], GROUP)
    print(f"\ngraph operations, function bodies counted: {counts}")
    measured = counts[OURS] / counts[PLAIN]
    report.target("graph operations, Adam, 600 variables, group of 8", measured, 1.25)
