"""Training steps that contenders share: in sessions, functions and MirroredStrategy.

A model is a ``tf.Module`` or a Keras model that minimises ``loss(model, x, y)``; a step
takes a shard of ``x`` and of ``y`` for every tower.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

import tw_builders
import tw_core
import tw_reduce
from tw_core.flat_variables import DEFAULT_BELOW_BYTES, flatten

v1 = tf.compat.v1
MIRRORED = "MirroredStrategy"
REPLICATED, SERVER = "replicated", "parameter server"
BOUND = "towers that do not reduce"
Loss = Callable[[Any, Any, Any], Any]


class Weights(tf.Module):
    """A model that is its variables."""

    def __init__(self, values: Sequence[np.ndarray]) -> None:
        super().__init__()
        self.all = [tf.Variable(value, name=f"w{i}") for i, value in enumerate(values)]


def cpus(count: int) -> list[str]:
    """Names the first logical CPUs."""
    return [f"/cpu:{k}" for k in range(count)]


def packed_sum(devices: list[str]) -> Any:
    """Adds in packs and gives every tower a copy."""
    balanced = partial(tw_reduce.sum_balanced, devices=devices)
    return tw_reduce.packed(tw_reduce.broadcast(balanced))


def function_step(
    devices: list[str],
    make: Callable[[], Any],
    loss: Loss,
    new: Callable[[], Any],
    *,
    kind: str = REPLICATED,
    below_bytes: int = DEFAULT_BELOW_BYTES,
    reduce: Any = None,
    map_towers: Callable[..., Any] = tw_core.map_towers,
    jit_compile: bool = False,
) -> tuple[Callable[[Any, Any], None], Any]:
    """Returns a step in a ``tf.function``, and tower 0's model.

    ``kind`` says who holds the variables: replicated, sharded, each with flat before
    it, a parameter server, or towers that do not reduce. Those of fewer than
    ``below_bytes`` lie in a flat one.
    ``reduce`` adds the gradients of replicated towers; by default in packs. With
    ``jit_compile`` XLA compiles the towers' gradients and their updates.
    """
    if jit_compile:
        map_towers = partial(map_towers, trace="once", jit_compile=True)
    ours = tw_core.towers(devices)
    build = partial(flatten, make, below_bytes=below_bytes) if "flat" in kind else make
    if kind == SERVER:
        setter = tw_core.LeastLoadedDeviceSetter(devices[0], devices)
        with tf.variable_creator_scope(setter.create):
            replicas = [build()]
        models = replicas * len(ours)
    else:
        models = replicas = tw_core.replicate(ours, lambda tower: build())
    if "sharded" in kind:
        optimizers = [tw_builders.make_sharded_optimizer(ours, new, replicas)[0]]
    else:
        optimizers = tw_builders.make_optimizers(ours[: len(replicas)], new, replicas)
    mean = tw_reduce.mean(reduce or packed_sum(devices))
    compiled = {"jit_compile": jit_compile}

    def gradients(tower: Any, model: Any, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(model, x, y)
        return tape.gradient(value, model.trainable_variables)

    @tf.function(autograph=False)
    def step(xs: Any, ys: Any) -> None:
        grads = map_towers(gradients, ours, models, xs, ys)
        if kind == SERVER:
            variables = models[0].trainable_variables
            pairs = [list(zip(own, variables, strict=True)) for own in grads]
            tw_builders.apply_shared_gradients(pairs, optimizers[0], **compiled)
        elif "sharded" in kind:
            tw_builders.apply_sharded_gradients(
                ours, grads, replicas, optimizers[0], **compiled
            )
        else:
            reduced = grads if kind == BOUND else mean(grads)
            tw_builders.apply_gradients(ours, reduced, replicas, optimizers, **compiled)

    return step, replicas[0].model if "flat" in kind else replicas[0]


def mirrored_step(
    strategy: Any, make: Callable[[], Any], loss: Loss, new: Callable[[], Any]
) -> tuple[Callable[[Any, Any], None], Any]:
    """Returns the same step under a MirroredStrategy, and its model."""
    with strategy.scope():
        model, optimizer = make(), new()
        if hasattr(optimizer, "build"):
            optimizer.build(model.trainable_variables)

    def replica_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(model, x, y) / strategy.num_replicas_in_sync
        variables = list(model.trainable_variables)
        grads = tape.gradient(value, variables)
        optimizer.apply_gradients(list(zip(grads, variables, strict=True)))

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> None:
        strategy.run(replica_step, args=(x, y))

    return step, model


def shards_of(devices: list[str], *arrays: np.ndarray) -> list[list[tf.Tensor]]:
    """Cuts arrays, and puts the parts of each on the devices."""
    found = []
    for array in arrays:
        parts = []
        for device, part in zip(devices, np.split(array, len(devices)), strict=True):
            with tf.device(device):
                parts.append(tf.identity(tf.constant(part)))
        found.append(parts)
    return found


def mirrored_shards(strategy: Any, *arrays: np.ndarray) -> list[Any]:
    """Cuts arrays, and gives the parts of each to the replicas."""

    def part(array: np.ndarray, context: Any) -> tf.Tensor:
        parts = np.split(array, strategy.num_replicas_in_sync)
        return tf.constant(parts[context.replica_id_in_sync_group])

    give = strategy.experimental_distribute_values_from_function
    return [give(partial(part, array)) for array in arrays]


def session_step(
    builder: Any, tower: Callable[[], Any], new: Callable[[], Any]
) -> tuple[v1.Session, tf.Operation, list[list[Any]]]:
    """Builds a step in the default graph: session, training op, variables [K][N].

    The session has the weights that every tower starts from.
    """
    grads = builder.call_for_each_tower(tower)
    built = builder.build(grads, new)
    train_op, sync = built if isinstance(built, tuple) else (built, None)
    session = v1.Session(config=tw_core.session_config())
    session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
    if sync is not None:
        session.run(sync)
    return session, train_op, [[v for _, v in own] for own in grads]


def squared_error(model: Any, x: Any, y: Any) -> Any:
    """The loss of a Keras model."""
    return tf.reduce_mean((model(x, training=True) - y) ** 2)


def values_of(model: Any) -> list[np.ndarray]:
    """Reads what a model trains."""
    return [np.asarray(tf.convert_to_tensor(v)) for v in model.trainable_variables]
