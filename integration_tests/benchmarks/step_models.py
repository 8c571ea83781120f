"""Training steps of Keras models of real size, beside MirroredStrategy.

Every contender trains the same model from the same weights on the same shards, held in
memory, with batch normalisation by tower, as MirroredStrategy has it. After two steps
all must have the same variables.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from harness import Contender, Timing, race

import tw_builders
import tw_core
import tw_reduce
from tw_core.flat_variables import DEFAULT_BELOW_BYTES, flatten

PEER = "MirroredStrategy"
REPLICATED = "replicated"
KINDS = (REPLICATED, "flat", "sharded", "flat sharded")
CHECKED_STEPS = 2
BELOW_BYTES = DEFAULT_BELOW_BYTES


def resnet() -> Any:
    """ResNet-50 without its top, on images of 64 x 64."""
    inputs = keras.Input((64, 64, 3))
    base = keras.applications.ResNet50(
        weights=None, include_top=False, input_tensor=inputs, pooling="avg"
    )
    return keras.Model(inputs, keras.layers.Dense(10)(base.output))


def transformer() -> Any:
    """Six blocks of width 128 with four heads, over 32 tokens."""
    tokens = x = keras.Input((32, 128))
    for _ in range(6):
        attended = keras.layers.MultiHeadAttention(4, 32)(x, x)
        x = keras.layers.LayerNormalization()(x + attended)
        hidden = keras.layers.Dense(512, activation="gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(128)(hidden))
    pooled = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, keras.layers.Dense(10)(pooled))


MODELS = {
    "ResNet-50, 64 x 64, batch 8": (resnet, (8, 64, 64, 3)),
    "transformer of 6 blocks, batch 16": (transformer, (16, 32, 128)),
}


def new_optimizer() -> Any:
    return keras.optimizers.Adam(1e-4)


def seeded(make: Callable[[], Any]) -> Any:
    keras.utils.set_random_seed(0)
    return make()


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean((model(x, training=True) - y) ** 2)


def ours(make: Any, x: np.ndarray, y: np.ndarray, towers: int, kind: str) -> Any:
    all_towers = tw_core.towers([f"/cpu:{k}" for k in range(towers)])
    devices = [tower.device for tower in all_towers]
    build = partial(seeded, make)
    if "flat" in kind:
        build = partial(flatten, build, below_bytes=BELOW_BYTES)
    replicas = tw_core.replicate(all_towers, lambda tower: build())
    is_sharded = "sharded" in kind
    if is_sharded:
        optimizer, _ = tw_builders.make_sharded_optimizer(
            all_towers, new_optimizer, replicas
        )
    else:
        optimizers = tw_builders.make_optimizers(all_towers, new_optimizer, replicas)
    reduce = tw_reduce.mean(
        tw_reduce.packed(
            tw_reduce.broadcast(partial(tw_reduce.sum_balanced, devices=devices))
        )
    )

    def gradients(tower: Any, model: Any, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        return tape.gradient(loss, model.trainable_variables)

    @tf.function(autograph=False)
    def step(xs: Any, ys: Any) -> None:
        grads = tw_core.map_towers(gradients, all_towers, replicas, xs, ys)
        if is_sharded:
            tw_builders.apply_sharded_gradients(all_towers, grads, replicas, optimizer)
        else:
            tw_builders.apply_gradients(all_towers, reduce(grads), replicas, optimizers)

    model = replicas[0].model if "flat" in kind else replicas[0]
    shards = [list(map(tf.constant, np.split(a, towers))) for a in (x, y)]
    return partial(step, *shards), model


def mirrored(make: Any, x: np.ndarray, y: np.ndarray, towers: int) -> Any:
    strategy = tf.distribute.MirroredStrategy([f"/cpu:{k}" for k in range(towers)])
    with strategy.scope():
        model = seeded(make)
        optimizer = new_optimizer()
        optimizer.build(model.trainable_variables)
    shards = [
        strategy.experimental_distribute_values_from_function(
            lambda context, own=own: tf.constant(own[context.replica_id_in_sync_group])
        )
        for own in (np.split(x, towers), np.split(y, towers))
    ]

    def replica_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y) / towers
        variables = model.trainable_variables
        grads = tape.gradient(loss, variables)
        optimizer.apply_gradients(list(zip(grads, variables, strict=True)))

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> None:
        strategy.run(replica_step, args=(x, y))

    return partial(step, *shards), model


def run_model(title: str, towers: int, rounds: int) -> list[Timing]:
    """Races the steps of one model."""
    tw_core.use_logical_cpus(towers)
    make, shape = MODELS[title]
    random = np.random.default_rng(0)
    x = random.standard_normal(shape).astype(np.float32)
    y = random.standard_normal((shape[0], 10)).astype(np.float32)
    peer, model = mirrored(make, x, y, towers)
    for _ in range(CHECKED_STEPS):
        peer()
    expected = [v.numpy() for v in model.trainable_variables]
    found = [Contender(PEER, peer, config="tf.function, default")]
    for kind in KINDS:
        run, model = ours(make, x, y, towers, kind)
        for _ in range(CHECKED_STEPS):
            run()
        for variable, want in zip(model.trainable_variables, expected, strict=True):
            # Adam moves every weight by about its rate, whatever its gradient's size.
            np.testing.assert_allclose(variable.numpy(), want, atol=5e-4, err_msg=kind)
        found.append(Contender(kind, run, config="tf.function, default"))
    return race(f"{title}, K = {towers}", found, peer=PEER, rounds=rounds)
