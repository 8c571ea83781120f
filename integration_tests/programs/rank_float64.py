"""Programs in float64, for ``test_float64``: over towers, over ranks, on one device.

Each returns the weights and the places where our code cast to a narrower float, or
back from one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from harness.casts import float64, narrow_casts

import tw_ampopt
import tw_ranks
import tw_rlload
import tw_syncrep
from tw_builders import RankShardedOptimizer, apply_gradients, make_optimizers
from tw_core import Tower, map_towers, replicate, towers
from tw_core.testing import CPUS
from tw_keras import TowerModel
from tw_reduce import all_reduce, mean

RANDOM = np.random.default_rng(0)
STEPS, ROWS = 3, 10  # of a batch, which no number of towers divides evenly
X = RANDOM.normal(size=(STEPS * ROWS, 3))
Y = RANDOM.normal(size=(STEPS * ROWS, 1))
CLIP = 0.3
optimizers = keras.optimizers
sgd = partial(optimizers.SGD, 0.1, momentum=0.9)


def made(_: Any = None) -> Any:
    own = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input([3]), *own])
    values = np.random.default_rng(1)
    model.set_weights([values.normal(size=own.shape) for own in model.weights])
    return model


def weight_of(rows: Any) -> tf.Tensor:
    """Returns a weight that float32 would round."""
    return 0.1 * tf.cast(tf.shape(rows)[0], tf.float64)


def fitted(
    group: Any,
    num_towers: int,
    optimizer: Callable[[], Any] = sgd,
    loss: Any = "mean_squared_error",
    *,
    weighs: bool = False,
    **options: Any,
) -> Any:
    compiles = {"jit_compile": options.pop("jit_compile", False)}
    if num_towers:
        options |= {} if group is None else {"group": group, "data": "shared"}
        options |= {"weights": lambda x, y, w: weight_of(x)} if weighs else {}
        model = TowerModel(made, CPUS[:num_towers], **options)
    else:
        model = made()
    model.compile(optimizer(), losses_of(loss), metrics=["mae"], **compiles)
    given = {"batch_size": ROWS, "shuffle": False, "verbose": 0, "epochs": 2}
    history = model.fit(X, Y, **given).history
    return model.get_weights(), list(history.values())


def losses_of(reduction: str) -> Any:
    if reduction == "sum":
        return keras.losses.MeanSquaredError("sum")
    return reduction


def gradients(_: Tower, model: Any, x: Any, y: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    return list(tape.gradient(loss, model.trainable_variables))


def stepped(group: Any, num_towers: int, prepare: Any, make: Any = sgd) -> Any:
    """Trains with a step of one's own, whose towers' weights float32 would round."""
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    ours = towers(CPUS[: num_towers or 1])
    models = replicate(ours, made)
    seats = [
        np.array_split(np.arange(ROWS), size * len(ours))[rank * len(ours) + k]
        for k in range(len(ours))
    ]
    if num_towers:
        apply = prepare(group, ours, models)
    else:
        plain = make()

        def apply(grads: Any, weights: Any) -> None:
            plain.apply(grads[0], models[0].trainable_variables)

    def step(first: Any) -> None:
        parts = [(tf.gather(X, first + s), tf.gather(Y, first + s)) for s in seats]
        grads = map_towers(gradients, ours, models, *zip(*parts, strict=True))
        apply(grads, [weight_of(x) for x, _ in parts])

    step = tf.function(step, autograph=False)
    for n in range(STEPS):
        step(tf.constant(n * ROWS))
    return models[0].get_weights()


def by_mean(group: Any, ours: Any, models: Any) -> Any:
    own = make_optimizers(ours, sgd, models)
    add = all_reduce([tower.device for tower in ours])

    def apply(grads: Any, weights: Any) -> None:
        if group is None:
            means = mean(add, weights=weights)(grads)
        else:
            means = tw_ranks.mean_across(grads, group=group, weights=weights)
        apply_gradients(ours, means, models, own)

    return apply


def by_shards(group: Any, ours: Any, models: Any) -> Any:
    own = RankShardedOptimizer(ours, models, sgd(), group=group)
    return lambda grads, weights: own.apply(grads, weights=weights)


def over_towers(_: Any, ours: Any, models: Any, **options: Any) -> Any:
    own = tw_ampopt.TowerOptimizer(
        [model.trainable_variables for model in models],
        tf_optimizer=options.pop("tf_optimizer", optimizers.SGD),
        learning_rate=lambda _: 0.1,
        **options,
    )

    def apply(grads: Any, weights: Any) -> None:
        if "loss_scale" in options:
            grads = [[own.apply_loss_scaling(grad) for grad in of] for of in grads]
        own.apply(grads, weights=weights)

    return apply


def accumulating(**options: Any) -> Any:
    """The towers' optimizer makes two half updates for one of the other."""

    def prepare(*given: Any) -> Any:
        apply = over_towers(*given, accumulation_steps=2, **options)

        def twice(grads: Any, weights: Any) -> None:
            apply(grads, weights)
            apply(grads, weights)

        return twice

    return prepare


plain = partial(optimizers.SGD, 0.1)
clipped = partial(optimizers.SGD, 0.1, global_clipnorm=CLIP)
gradual = {"loss_scale": tw_ampopt.GradualLossScale(init=10.3)}
FITS: dict[str, Any] = {
    "fit": {},
    "fit, weights": {"weighs": True},
    "fit, sums": {"loss": "sum", "optimizer": partial(optimizers.SGD, 0.01)},
    "fit, sharded": {"variables": "sharded", "weighs": True},
    "fit, shared": {"variables": "parameter_server", "weighs": True},
    "fit, accumulated": {
        "optimizer": partial(optimizers.SGD, 0.1, gradient_accumulation_steps=2),
        "weighs": True,
    },
    "fit, accumulated, sharded": {
        "optimizer": partial(optimizers.SGD, 0.1, gradient_accumulation_steps=2),
        "variables": "sharded",
    },
    "fit, scaled": {
        "optimizer": lambda: optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0**9)
    },
    "fit, clipped": {"optimizer": partial(sgd, global_clipnorm=CLIP)},
    "fit, compiled": {"jit_compile": True},
}
MEAN: dict[str, Any] = {"mean": {"prepare": by_mean}}
SHARDS: dict[str, Any] = {"shards over ranks": {"prepare": by_shards}}
OVER_TOWERS: dict[str, Any] = {
    "over towers": {"prepare": over_towers, "make": plain},
    "over towers, clipped": {
        "prepare": partial(over_towers, clip_by_global_norm=CLIP),
        "make": clipped,
    },
    "over towers, accumulated": {"prepare": accumulating(), "make": plain},
    "over towers, scaled": {"prepare": partial(over_towers, **gradual), "make": plain},
    "over towers, accumulated, scaled": {
        "prepare": accumulating(**gradual),
        "make": plain,
    },
    "over towers, Adam of ours": {
        "prepare": partial(over_towers, tf_optimizer=tw_ampopt.SimpleAdam),
        "make": partial(optimizers.Adam, 0.1, epsilon=1e-8),
    },
}


def epochs() -> list[str]:
    """Returns the casts of epochs on loaded data."""
    ours = towers(CPUS[:2])
    specs = {
        name: tf.TensorSpec([None, n], tf.float64) for name, n in (("x", 3), ("y", 1))
    }
    batch = tw_rlload.DeviceBatch(ours, specs, max_per_device_batch_size=4)
    with float64(), narrow_casts() as found:
        models = replicate(ours, made)

        def loss(model: Any, inputs: Any) -> Any:
            return tf.reduce_mean((model(inputs["x"]) - inputs["y"]) ** 2)

        own = [sgd() for _ in ours]
        train = tw_rlload.EpochFunction(batch, loss, models, own)
        batch.load({"x": X, "y": Y})
        train.run_epochs(2, "rows", seed=0)
    return found


def numbers() -> list[str]:
    """Returns the casts of a step whose towers have a Python number as their weight."""
    with float64(), narrow_casts() as found:
        model = TowerModel(made, CPUS[:2], weights=lambda x, y, w: 0.3)
        model.compile(sgd(), "mse")
        model.fit(X, Y, batch_size=ROWS, verbose=0)
    return found


def replicas() -> list[str]:
    """Returns the casts of a graph of synchronous replicas, with weights."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), narrow_casts() as found:
        step = v1.train.get_or_create_global_step()
        own = [
            v1.get_variable(n, s, tf.float64) for n, s in (("w", [3, 1]), ("b", [9]))
        ]
        loss = tf.reduce_mean((X @ own[0] - Y) ** 2) + tf.reduce_sum(own[1])
        opt = tw_syncrep.SyncReplicasOptimizer(
            v1.train.MomentumOptimizer(0.1, 0.9),
            replicas_to_aggregate=2,
            total_num_replicas=2,
            replica_index=0,
        )
        opt.apply_gradients(
            list(zip(tf.gradients(loss, own), own, strict=True)), step, weight=0.3
        )
    return found


def trained(group: Any, name: str, num_towers: int) -> tuple[Any, list[str]]:
    """Trains a program; 0 towers: by Keras on one device."""
    with float64(), narrow_casts() as found:
        if name in FITS:
            own = FITS[name]
            if not num_towers:
                keys = ("variables", "weighs")
                own = {k: v for k, v in own.items() if k not in keys}
            return fitted(group, num_towers, **own), found
        return stepped(group, num_towers, **(MEAN | SHARDS | OVER_TOWERS)[name]), found
