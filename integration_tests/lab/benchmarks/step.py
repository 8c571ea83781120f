"""Whole training steps: builders and their functions against MirroredStrategy.

Every contender trains the same model from the same weights on the same shards,
held in memory. Before anything is timed, each runs three steps and must have the
variables that one device reaches on the whole batch.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import racing
import step_models
import tensorflow as tf
import training
from racing import Contender, Report, Timing, race
from training import BOUND, REPLICATED, SERVER
from training import MIRRORED as PEER

import tw_builders
import tw_core
import tw_reduce
from tw_core.flat_variables import DEFAULT_BELOW_BYTES

OPTIONS = {
    "rounds": 31,
    "towers": [2, 4],
    "groups": ("graph", "function", "keras", "adam", "small", "apply", "models"),
}

v1 = tf.compat.v1
ALONE, AUTO = "one device, whole batch", "replicated, auto"
CHECKED_STEPS = 3
RATE = 0.01
ADAM_RATE = 1e-4
BELOW_BYTES = DEFAULT_BELOW_BYTES


class Work:
    """A model of dense layers, and a batch."""

    def __init__(self, name: str, widths: list[int], batch: int, *, biases: bool):
        random = np.random.default_rng(0)
        self.name = name
        self.biases = biases
        self.kernels = [
            (random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
            for shape in pairwise(widths)
        ]
        self.x = random.standard_normal((batch, widths[0])).astype(np.float32)
        self.y = random.standard_normal((batch, widths[-1])).astype(np.float32)

    def weights(self) -> list[np.ndarray]:
        flat = []
        for kernel in self.kernels:
            flat.append(kernel)
            if self.biases:
                flat.append(np.zeros(kernel.shape[1], np.float32))
        return flat

    def loss(self, weights: list[Any], x: Any, y: Any) -> Any:
        step = 2 if self.biases else 1
        for i in range(0, len(weights), step):
            x = x @ weights[i]
            if self.biases:
                x = x + weights[i + 1]
            if i + step < len(weights):
                x = tf.nn.relu(x)
        return tf.reduce_mean((x - y) ** 2)


WORKS = {
    "mlp": lambda: Work("MLP 6 x 512, batch 256", [512] * 7, 256, biases=False),
    "small": lambda: Work("25 variables, batch 64", [16] * 13 + [1], 64, biases=True),
}


class Module(training.Weights):
    def __init__(self, work: Work):
        super().__init__(work.weights())
        self.work = work

    def loss(self, x: Any, y: Any) -> Any:
        return self.work.loss(self.all, x, y)


def module_loss(model: Any, x: Any, y: Any) -> Any:
    if isinstance(model, Module):
        return model.loss(x, y)
    with model.reading():
        return model.model.loss(x, y)


def keras_model(work: Work) -> Any:
    layers = [keras.Input([work.kernels[0].shape[0]])]
    for kernel in work.kernels:
        last = kernel is work.kernels[-1]
        activation = None if last else "relu"
        layers.append(
            keras.layers.Dense(kernel.shape[1], activation, use_bias=work.biases)
        )
    model = keras.Sequential(layers)
    model.set_weights(work.weights())
    return model


def momentum() -> Any:
    return v1.train.MomentumOptimizer(RATE, 0.9)


def adam() -> Any:
    return v1.train.AdamOptimizer(ADAM_RATE)


Built = tuple[Callable[[], Any], Callable[[], list[np.ndarray]]]


def graph_step(work: Work, towers: int, kind: str, new: Any = momentum) -> Built:
    shards = list(zip(np.split(work.x, towers), np.split(work.y, towers), strict=True))

    def tower() -> Any:
        k = tw_core.get_current_tower_context().index
        held = [_held(f"{name}{k}", a) for name, a in zip("xy", shards[k], strict=True)]
        weights = [
            v1.get_variable(f"w{i}", initializer=w)
            for i, w in enumerate(work.weights())
        ]
        loss = work.loss(weights, *held)
        return list(zip(tf.gradients(loss, weights), weights, strict=True))

    with tf.Graph().as_default():
        builder = _builder(kind, racing.device_names(towers))
        session, train_op, [first, *_] = training.session_step(builder, tower, new)
    return session.make_callable(train_op), lambda: session.run(first)


def _builder(kind: str, devices: list[str]) -> Any:
    below = BELOW_BYTES if "flat" in kind else 0
    if kind == SERVER:
        return tw_builders.SyncMultiGPUParameterServerBuilder(devices, "gpu")
    if "sharded" in kind:
        return tw_builders.SyncMultiGPUShardedBuilder(
            devices, True, flat_below_bytes=below
        )
    reducers = {
        AUTO: tw_reduce.broadcast(tw_reduce.auto(devices)),
        BOUND: lambda grads: grads,
    }
    reducer = reducers.get(kind, training.packed_sum(devices))
    return tw_builders.SyncMultiGPUReplicatedBuilder(
        devices, kind != BOUND, reducer, flat_below_bytes=below
    )


def _held(name: str, value: np.ndarray) -> Any:
    # A local variable is not fed in every step, and no constant is folded.
    with v1.variable_scope("data", reuse=False):
        return v1.Variable(
            value, trainable=False, collections=["local_variables"], name=name
        )


def _model(work: Work, *, with_keras: bool) -> tuple[Any, Any, Any]:
    """Returns what makes a model, its loss and what makes its optimizer."""
    if with_keras:
        sgd = partial(keras.optimizers.SGD, RATE, momentum=0.9)
        return partial(keras_model, work), training.squared_error, sgd
    return partial(Module, work), module_loss, momentum


def function_step(
    work: Work, towers: int, kind: str, *, with_keras: bool, **options: Any
) -> Built:
    made = _model(work, with_keras=with_keras)
    options = {"kind": kind, "below_bytes": BELOW_BYTES, **options}
    step, model = training.function_step(racing.device_names(towers), *made, **options)
    shards = training.shards_of(racing.device_names(towers), work.x, work.y)
    return partial(step, *shards), lambda: training.values_of(model)


def mirrored(work: Work, towers: int, *, with_keras: bool) -> Built:
    strategy = tf.distribute.MirroredStrategy(racing.device_names(towers))
    made = _model(work, with_keras=with_keras)
    step, model = training.mirrored_step(strategy, *made)
    shards = training.mirrored_shards(strategy, work.x, work.y)
    return partial(step, *shards), lambda: training.values_of(model)


def checked(
    work: Work, name: str, built: Built, config: str, new: Any = None
) -> Contender:
    """Compares three steps with those of one device on the whole batch."""
    run, reference = graph_step(work, 1, ALONE, new or momentum)
    for _ in range(CHECKED_STEPS):
        run()
    return racing.checked(name, *built, reference(), steps=CHECKED_STEPS, config=config)


GRAPH = "session, tw_core.session_config()"
FUNCTION = "tf.function, default"


# Adam in a session graph, against replicated towers: K -> at most.
SHARDED = {4: 0.82, 8: 0.66}
TARGETS: dict[str, dict[str, float]] = {
    "graph": {},
    "function": {"flat": 0.45},
    "keras": {"flat": 0.5},
}
# Of the time of towers that do not reduce, but apply K times: only what is above 1 can
# still be taken from replicated ones.
TO_BOUND = {REPLICATED: 1.15, SERVER: 1.1}
FLAT_OF_TWO = 0.48  # in a function, at K = 2


def run_cell(group: str, towers: int, rounds: int) -> list[Timing]:
    """Races one group at one number of towers."""
    racing.use_devices(towers)
    work = WORKS["mlp" if group == "graph" else "small"]()
    with_keras = group == "keras"
    built = mirrored(work, towers, with_keras=with_keras)
    found = [checked(work, PEER, built, FUNCTION)]
    for kind in (REPLICATED, "sharded", "flat", SERVER):
        if group == "graph":
            built, config = graph_step(work, towers, kind), GRAPH
        else:
            built = function_step(work, towers, kind, with_keras=with_keras)
            config = FUNCTION
        found.append(checked(work, kind, built, config))
    if group == "graph":
        alone, config = graph_step(work, 1, ALONE), GRAPH
        bound = graph_step(work, towers, BOUND)
    else:
        alone = function_step(work, 1, REPLICATED, with_keras=with_keras)
        config = FUNCTION
        bound = function_step(work, towers, BOUND, with_keras=with_keras)
    found.append(checked(work, ALONE, alone, config))
    found.append(Contender(BOUND, bound[0], is_bound=True, config=config))
    title = f"{work.name}, {group}, K = {towers}"
    return race(title, found, peer=PEER, rounds=rounds)


def run_kinds(
    name: str, kinds: tuple[str, ...], new: Any, what: str, towers: int, rounds: int
) -> list[Timing]:
    """Races towers of some kinds, of which the first are replicated, in a session."""
    racing.use_devices(towers)
    work = WORKS[name]()
    found = [
        checked(work, kind, graph_step(work, towers, kind, new), GRAPH, new)
        for kind in kinds
    ]
    title = f"{work.name}, {what}, K = {towers}"
    return race(title, found, peer=REPLICATED, rounds=rounds)


def run_apply(towers: int, rounds: int) -> list[Timing]:
    """Races reducing and applying many small gradients, which are held in memory."""
    racing.use_devices(towers)
    found = [apply_step(towers, kind) for kind in (AUTO, "flat", "flat sharded")]
    title = f"400 variables of 1,024 floats, reduce and Adam, K = {towers}"
    return race(title, found, peer=AUTO, rounds=rounds)


def apply_step(towers: int, kind: str) -> Contender:
    """A step without a model: what comes after the gradients."""
    gradients = _given(towers)

    def tower() -> Any:
        k = tw_core.get_current_tower_context().index
        held = _held(f"g{k}", gradients[k])
        return [
            (g, v1.get_variable(f"w{n}", initializer=np.ones(1_024, "f")))
            for n, g in enumerate(tf.unstack(held.read_value()))
        ]

    with tf.Graph().as_default():
        builder = _builder(kind, racing.device_names(towers))
        session, train_op, [*_, last] = training.session_step(builder, tower, adam)
    return racing.checked(
        kind,
        session.make_callable(train_op),
        lambda: session.run(last),
        _applied(gradients),
        steps=CHECKED_STEPS,
        rtol=1e-5,
        atol=1e-6,
        config=GRAPH,
    )


def _given(towers: int) -> np.ndarray:
    random = np.random.default_rng(1)
    return random.standard_normal((towers, 400, 1_024)).astype(np.float32)


def _applied(gradients: np.ndarray) -> list[np.ndarray]:
    """Returns what Adam makes of the same gradients in NumPy."""
    mean = gradients.mean(axis=0).astype(np.float64)
    m = v = 0.0
    value = np.ones_like(mean)
    for t in range(1, CHECKED_STEPS + 1):
        m, v = 0.9 * m + 0.1 * mean, 0.999 * v + 0.001 * mean**2
        rate = ADAM_RATE * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        value = value - rate * m / (np.sqrt(v) + 1e-8)
    return list(value.astype(np.float32))


# What runs, K -> at most, against whom, and who.
AGAINST = {
    # Replicated towers apply Adam K times.
    "adam": (
        partial(run_kinds, "mlp", (REPLICATED, "sharded"), adam, "Adam, graph"),
        *(SHARDED, REPLICATED, "sharded"),
    ),
    "small": (
        partial(
            *(run_kinds, "small", (REPLICATED, "flat", "flat sharded")),
            *(momentum, "graph"),
        ),
        *({4: 0.7}, REPLICATED, "flat"),
    ),
    "apply": (run_apply, {4: 0.25}, AUTO, "flat"),
}


def main(options: Any, report: Report) -> None:
    """Races training steps."""
    for group in (group for group in options.groups if group in TARGETS):
        for towers in [4] if group == "graph" else options.towers:
            timings = report.race(PEER, run_cell, group, towers, options.rounds)
            for name, at_most in TARGETS[group].items():
                if (group, name, towers) == ("function", "flat", 2):
                    at_most = FLAT_OF_TWO
                report.compare(timings, name, PEER, at_most)
            for name, at_most in TO_BOUND.items():
                report.compare(timings, name, BOUND, at_most)
            if group == "graph":
                report.compare(timings, REPLICATED, ALONE, 1.25)
    for group in (group for group in options.groups if group in AGAINST):
        run, cells, peer, name = AGAINST[group]
        for towers, at_most in cells.items():
            timings = report.race(peer, run, towers, options.rounds)
            report.compare(timings, name, peer, at_most)
    for title in step_models.MODELS if "models" in options.groups else ():
        rounds = min(options.rounds, 15)
        timings = report.race(PEER, step_models.run_model, title, 2, rounds)
        for name in ("flat", "flat sharded"):
            report.compare(timings, name, PEER, 0.9)
            report.compare(timings, name, REPLICATED, 1.0)
