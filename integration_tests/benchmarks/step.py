"""Whole training steps: builders and their functions beside MirroredStrategy.

Every contender trains the same model from the same weights on the same shards,
held in memory. Before anything is timed, each takes three steps and must have
the variables that one device reaches on the whole batch.
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import step_models
import tensorflow as tf
from harness import (
    Contender,
    Report,
    Timing,
    race,
)

import tw_builders
import tw_core
import tw_reduce
from tw_core.flat_variables import DEFAULT_BELOW_BYTES, flatten

OPTIONS = {
    "rounds": 31,
    "towers": [2, 4],
    "groups": ("graph", "function", "keras", "adam", "small", "apply", "models"),
}

v1 = tf.compat.v1
CHECKED_STEPS = 3
FLAT = ("flat", "flat sharded")
SHARDED_KINDS = ("sharded", "flat sharded")
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


class Module(tf.Module):
    def __init__(self, work: Work):
        super().__init__()
        self.work = work
        self.weights = [
            tf.Variable(w, name=f"w{i}") for i, w in enumerate(work.weights())
        ]

    def loss(self, x: Any, y: Any) -> Any:
        return self.work.loss(self.weights, x, y)


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


def keras_loss(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean((model(x, training=True) - y) ** 2)


Built = tuple[Callable[[], Any], Callable[[], list[np.ndarray]]]


def one_device(work: Work, new: Any = None) -> Built:
    """One big batch on one device, graph mode."""
    return graph_step(work, 1, "one device", new or momentum)


def momentum() -> Any:
    return v1.train.MomentumOptimizer(RATE, 0.9)


def adam() -> Any:
    return v1.train.AdamOptimizer(ADAM_RATE)


def graph_step(work: Work, towers: int, kind: str, new: Any = momentum) -> Built:
    devices = [f"/cpu:{k}" for k in range(towers)]
    with tf.Graph().as_default():
        shards = list(
            zip(np.split(work.x, towers), np.split(work.y, towers), strict=True)
        )

        def tower() -> Any:
            k = tw_core.get_current_tower_context().index
            with v1.variable_scope("data", reuse=False):
                held = [
                    _held(f"{name}{k}", a)
                    for name, a in zip("xy", shards[k], strict=True)
                ]
            weights = [
                v1.get_variable(f"w{i}", initializer=w)
                for i, w in enumerate(work.weights())
            ]
            loss = work.loss(weights, *held)
            return list(zip(tf.gradients(loss, weights), weights, strict=True))

        builder = _builder(kind, devices)
        grads = builder.call_for_each_tower(tower)
        built = builder.build(grads, new)
        train_op, sync = built if isinstance(built, tuple) else (built, None)
        session = v1.Session(config=tw_core.session_config())
        session.run(
            [v1.global_variables_initializer(), v1.local_variables_initializer()]
        )
        if sync is not None:
            session.run(sync)
    variables = [v for _, v in grads[0]]
    return session.make_callable(train_op), lambda: session.run(variables)


def _builder(kind: str, devices: list[str]) -> Any:
    below = BELOW_BYTES if kind in FLAT else 0
    if kind == "parameter server":
        return tw_builders.SyncMultiGPUParameterServerBuilder(devices, "gpu")
    if kind in SHARDED_KINDS:
        return tw_builders.SyncMultiGPUShardedBuilder(
            devices, True, flat_below_bytes=below
        )
    reducer = partial(tw_reduce.sum_balanced, devices=devices)
    return tw_builders.SyncMultiGPUReplicatedBuilder(
        devices,
        True,
        tw_reduce.packed(tw_reduce.broadcast(reducer)),
        flat_below_bytes=below,
    )


def _held(name: str, value: np.ndarray) -> Any:
    # A local variable is not fed in every step, and no constant is folded.
    return v1.Variable(
        value, trainable=False, collections=["local_variables"], name=name
    )


def function_step(work: Work, towers: int, kind: str, *, with_keras: bool) -> Built:
    ours = tw_core.towers([f"/cpu:{k}" for k in range(towers)])
    devices = [tower.device for tower in ours]
    make = keras_model if with_keras else Module
    shared = kind == "parameter server"
    if shared:
        setter = tw_core.LeastLoadedDeviceSetter(devices[0], devices)
        with tf.variable_creator_scope(setter.create):
            replicas = [make(work)]
    else:
        build = partial(make, work)
        if kind in FLAT:
            build = partial(flatten, build, below_bytes=BELOW_BYTES)
        replicas = tw_core.replicate(ours, lambda tower: build())
    new = partial(keras.optimizers.SGD, RATE, momentum=0.9) if with_keras else momentum
    if kind in SHARDED_KINDS:
        optimizer, _ = tw_builders.make_sharded_optimizer(ours, new, replicas)
        optimizers = [optimizer]
    else:
        optimizers = tw_builders.make_optimizers(ours[: len(replicas)], new, replicas)
    models = replicas * towers if shared else replicas
    shards = _shards(work, devices)
    reducer = tw_reduce.mean(
        tw_reduce.packed(
            tw_reduce.broadcast(partial(tw_reduce.sum_balanced, devices=devices))
        )
    )

    def gradients(tower: Any, model: Any, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = keras_loss(model, x, y) if with_keras else module_loss(model, x, y)
        return tape.gradient(loss, model.trainable_variables)

    @tf.function(autograph=False)
    def step(xs: Any, ys: Any) -> None:
        grads = tw_core.map_towers(gradients, ours, models, xs, ys)
        if shared:
            variables = models[0].trainable_variables
            pairs = [list(zip(own, variables, strict=True)) for own in grads]
            tw_builders.apply_shared_gradients(pairs, optimizers[0])
        elif kind in SHARDED_KINDS:
            tw_builders.apply_sharded_gradients(ours, grads, replicas, optimizers[0])
        else:
            tw_builders.apply_gradients(ours, reducer(grads), replicas, optimizers)

    first = replicas[0].model if kind in FLAT else replicas[0]
    return partial(step, *shards), lambda: _values(first)


def _shards(work: Work, devices: list[str]) -> tuple[list[Any], list[Any]]:
    pieces: tuple[list[Any], list[Any]] = ([], [])
    for piece, array in zip(pieces, (work.x, work.y), strict=True):
        for device, shard in zip(devices, np.split(array, len(devices)), strict=True):
            with tf.device(device):
                piece.append(tf.identity(tf.constant(shard)))
    return pieces


def mirrored(work: Work, towers: int, *, with_keras: bool) -> Built:
    strategy = tf.distribute.MirroredStrategy([f"/cpu:{k}" for k in range(towers)])
    with strategy.scope():
        model = keras_model(work) if with_keras else Module(work)
        if with_keras:
            optimizer = keras.optimizers.SGD(RATE, momentum=0.9)
            optimizer.build(model.trainable_variables)
        else:
            optimizer = v1.train.MomentumOptimizer(RATE, 0.9)
    pieces = [np.split(array, towers) for array in (work.x, work.y)]
    shards = [
        strategy.experimental_distribute_values_from_function(
            lambda context, own=own: tf.constant(own[context.replica_id_in_sync_group])
        )
        for own in pieces
    ]

    def replica_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = keras_loss(model, x, y) if with_keras else model.loss(x, y)
            loss = loss / towers
        variables = list(model.trainable_variables)
        grads = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(grads, variables, strict=True))

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> None:
        strategy.run(replica_step, args=(x, y))

    return partial(step, *shards), lambda: _values(model)


def _values(model: Any) -> list[np.ndarray]:
    return [np.asarray(tf.convert_to_tensor(v)) for v in model.trainable_variables]


def checked(
    work: Work, name: str, built: Built, config: str, new: Any = None
) -> Contender:
    run, values = built
    for _ in range(CHECKED_STEPS):
        run()
    reference_run, reference = one_device(work, new)
    for _ in range(CHECKED_STEPS):
        reference_run()
    for got, want in zip(values(), reference(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=name)
    return Contender(name, run, config=config)


GRAPH = "session, tw_core.session_config()"
FUNCTION = "tf.function, default"


def contenders(work: Work, towers: int, group: str) -> list[Contender]:
    with_keras = group == "keras"
    found = [
        checked(work, PEER, mirrored(work, towers, with_keras=with_keras), FUNCTION)
    ]
    for kind in ("replicated", "sharded", "flat", "parameter server"):
        if group == "graph":
            built, config = graph_step(work, towers, kind), GRAPH
        else:
            built = function_step(work, towers, kind, with_keras=with_keras)
            config = FUNCTION
        found.append(checked(work, kind, built, config))
    found.append(checked(work, ALONE, one_device(work), GRAPH))
    return found


PEER = "MirroredStrategy"
ALONE = "one device, whole batch"
REPLICATED = "replicated"
TARGETS = {
    "graph": {"replicated": 0.6, "sharded": 0.6, "parameter server": 0.55},
    "function": {"replicated": 0.6, "flat": 0.45, "parameter server": 0.5},
    "keras": {"replicated": 0.65, "flat": 0.5, "parameter server": 0.65},
}
FLAT_OF_TWO = 0.48  # in a function, at K = 2


# Adam in a session graph, against replicated towers: K -> at most.
SHARDED = {4: 0.82, 8: 0.66}


def run_adam(towers: int, rounds: int) -> list[Timing]:
    """Races sharded towers with replicated ones, which apply Adam K times."""
    tw_core.use_logical_cpus(towers)
    work = WORKS["mlp"]()
    found = [
        checked(work, kind, graph_step(work, towers, kind, adam), GRAPH, adam)
        for kind in (REPLICATED, "sharded")
    ]
    title = f"{work.name}, Adam, graph, K = {towers}"
    return race(title, found, peer=REPLICATED, rounds=rounds)


def run_small(towers: int, rounds: int) -> list[Timing]:
    """Races flat towers with replicated ones, on small variables in a session."""
    tw_core.use_logical_cpus(towers)
    work = WORKS["small"]()
    found = [
        checked(work, kind, graph_step(work, towers, kind), GRAPH)
        for kind in (REPLICATED, "flat", "flat sharded")
    ]
    title = f"{work.name}, graph, K = {towers}"
    return race(title, found, peer=REPLICATED, rounds=rounds)


def run_apply(towers: int, rounds: int) -> list[Timing]:
    """Races reducing and applying many small gradients, which are held in memory."""
    tw_core.use_logical_cpus(towers)
    found = [
        Contender(name, apply_step(towers, name), config=GRAPH)
        for name in (AUTO, "flat", "flat sharded")
    ]
    title = f"400 variables of 1,024 floats, reduce and Adam, K = {towers}"
    return race(title, found, peer=AUTO, rounds=rounds)


AUTO = "replicated, auto"


def apply_step(towers: int, kind: str) -> Callable[[], Any]:
    """A step without a model: what comes after the gradients."""
    devices = [f"/cpu:{k}" for k in range(towers)]
    random = np.random.default_rng(1)
    gradients = random.standard_normal((towers, 400, 1_024)).astype(np.float32)
    with tf.Graph().as_default():

        def tower() -> Any:
            k = tw_core.get_current_tower_context().index
            with v1.variable_scope("data", reuse=False):
                held = _held(f"g{k}", gradients[k])
            return [
                (g, v1.get_variable(f"w{n}", initializer=np.ones(1_024, "f")))
                for n, g in enumerate(tf.unstack(held.read_value()))
            ]

        if kind == AUTO:
            builder: Any = tw_builders.SyncMultiGPUReplicatedBuilder(
                devices, True, tw_reduce.broadcast(tw_reduce.auto(devices))
            )
        else:
            builder = _builder(kind, devices)
        grads = builder.call_for_each_tower(tower)
        train_op, sync = builder.build(grads, adam)
        session = v1.Session(config=tw_core.session_config())
        session.run(
            [v1.global_variables_initializer(), v1.local_variables_initializer()]
        )
        session.run(sync)
        step = session.make_callable(train_op)
        for _ in range(CHECKED_STEPS):
            step()
        got = session.run([v for _, v in grads[-1]])
        for value, want in zip(got, _applied(towers), strict=True):
            np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-6)
    return step


@cache
def _applied(towers: int) -> list[np.ndarray]:
    """Returns what Adam makes of the same gradients in NumPy."""
    random = np.random.default_rng(1)
    gradients = random.standard_normal((towers, 400, 1_024)).astype(np.float32)
    mean = gradients.mean(axis=0).astype(np.float64)
    m = v = 0.0
    value = np.ones_like(mean)
    for t in range(1, CHECKED_STEPS + 1):
        m, v = 0.9 * m + 0.1 * mean, 0.999 * v + 0.001 * mean**2
        rate = ADAM_RATE * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        value = value - rate * m / (np.sqrt(v) + 1e-8)
    return list(value.astype(np.float32))


def run_cell(group: str, towers: int, rounds: int) -> list[Timing]:
    """Races one group at one number of towers."""
    tw_core.use_logical_cpus(towers)
    work = WORKS["mlp" if group == "graph" else "small"]()
    title = f"{work.name}, {group}, K = {towers}"
    return race(title, contenders(work, towers, group), peer=PEER, rounds=rounds)


# What runs, K -> at most, against whom, and who.
AGAINST = {
    "adam": (run_adam, SHARDED, REPLICATED, "sharded"),
    "small": (run_small, {4: 0.7}, REPLICATED, "flat"),
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
            if group == "graph":
                report.compare(timings, "replicated", ALONE, 1.25)
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
