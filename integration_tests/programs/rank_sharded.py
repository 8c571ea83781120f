"""What ranks do in ``test_sharded_over_ranks``, each with a shard of the state."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from harness import keras_optimizers

from programs import rank_training

SHARDED = {"variables": "sharded"}


def layers() -> keras.Model:
    own = keras.layers
    hidden = own.Dense(9, "tanh", name="hidden")
    last = [own.Dense(3, name="words"), own.Dense(1, name="out")]
    return keras.Sequential([keras.Input([4]), hidden, *last])


def table() -> keras.Model:
    own = keras.layers
    read = [own.Embedding(9, 3, name="words"), own.Flatten()]
    return keras.Sequential([keras.Input([4], dtype="int32"), *read, own.Dense(1)])


def made(group: Any, optimizer: str, towers: int, make: Any = layers) -> Any:
    options = SHARDED if group is not None else {}
    model = rank_training.made(group, make, towers, **options)
    # Compiled, Keras's own fit begins with momenta of 0 in place of the weights.
    is_eager = optimizer.startswith("ScheduleFree") and group is None
    own = keras_optimizers.make(optimizer)
    model.compile(own, "mse", metrics=["mae"], run_eagerly=is_eager)
    return model


def fit(
    group: Any, model: Any, epochs: int, x: Any = rank_training.X, **options: Any
) -> Any:
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    x, y = (rank_training.rows_of(rank, size, array) for array in (x, rank_training.Y))
    given = {"batch_size": rank_training.BATCH // size, "shuffle": False, "verbose": 0}
    return model.fit(x, y, epochs=epochs, **given, **options).history


def optimized(group: Any, optimizer: str, towers: int) -> Any:
    """Returns the history, the weights, and the bytes of this rank's state."""
    model = made(group, optimizer, towers)
    history = fit(group, model, 2)
    state = sum(
        tf.convert_to_tensor(v).numpy().nbytes for v in model.optimizer.variables
    )
    return history, model.get_weights(), state


def clipped(group: Any, optimizer: str, towers: int) -> Any:
    """Trains a table, of which a batch reads rows several times."""
    model = made(group, optimizer, towers, table)
    words = (np.abs(rank_training.X) * 10).astype("int32") % 9
    return fit(group, model, 2, words), model.get_weights()


def backup(folder: str) -> Any:
    return keras.callbacks.BackupAndRestore(f"{folder}/b", delete_checkpoint=False)


def saved(group: Any, optimizer: str, towers: int, folder: str) -> Any:
    """Trains, saves, goes on, loads, goes on again; then another model restores."""
    model = made(group, optimizer, towers)
    file = keras.callbacks.ModelCheckpoint(f"{folder}/epoch.keras")
    histories = [fit(group, model, 2, callbacks=[file, backup(folder)])]
    model.save(f"{folder}/end.keras")
    model.save_weights(f"{folder}/end.weights.h5")
    histories.append(fit(group, model, 1))
    ends = [model.get_weights()]
    model.load_weights(f"{folder}/end.weights.h5")
    histories.append(fit(group, model, 1))
    ends.append(model.get_weights())
    model = made(group, optimizer, towers)
    histories.append(fit(group, model, 3, callbacks=[backup(folder)]))
    return histories, ends[0], ends[1], model.get_weights()


def loaded(group: Any, path: str, towers: int) -> Any:
    """Goes on with a model of a file, which each rank loads."""
    options = SHARDED if group is not None else {}
    make = lambda: keras.models.load_model(path)  # noqa: E731
    model = rank_training.made(group, make, towers, **options)
    return fit(group, model, 1), model.get_weights()


def refused(group: Any, kind: str) -> None:
    """Does what ranks with shards cannot do."""
    if kind == "MultiOptimizer":
        made(group, kind, 1)
    model = made(group, "Adam", 1)
    own = keras.callbacks
    callbacks = {
        "frequency": lambda: own.ModelCheckpoint("x.keras", save_freq=2),
        "swap": own.SwapEMAWeights,
    }
    fit(group, model, 1, callbacks=[callbacks[kind]()])


def near(got: Any, want: Any) -> float:
    """Returns the largest difference of two nests of numbers."""
    pairs = zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True)
    return max(float(np.max(np.abs(np.subtract(one, other)))) for one, other in pairs)
