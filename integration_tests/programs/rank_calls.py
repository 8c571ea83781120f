"""What ranks do in ``test_training_over_ranks`` beside whole histories.

Batches by hand, files, moving averages, random numbers, and what is
refused.
"""

import functools
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from programs.rank_batches import own_batches
from programs.rank_groups import Alone
from programs.rank_training import (
    BATCH,
    OWN_ROWS,
    WEIGHTS,
    GoesOn,
    X,
    Y,
    accumulating,
    callbacks,
    dense,
    layers,
    made,
    normed,
    optimizers,
    rows_of,
    run,
    seeded,
    synchronized,
)
from tw_core.synchronized import sum_over_towers
from tw_core.testing import CPUS
from tw_keras import TowerModel, on_rank_0
from tw_reduce import sum_on_device


def not_a_number(group: Any) -> Any:
    """Has a row that is not a number on one rank; returns the updates of all."""
    model = made(group, dense, 1)
    x = X[:24].copy()
    x[8, 0] = np.nan if group.rank == 1 else 0.0
    model.compile("sgd", "mse")
    model.fit(
        *(x, Y[:24], 6, 3),
        verbose=0,
        shuffle=False,
        callbacks=[callbacks.TerminateOnNaN()],
    )
    return int(model.optimizer.iterations.numpy())


def by_hand(group: Any, folder: str) -> Any:
    """Trains on batches, predicts on one rank alone, saves and loads weights."""
    model = made(group, dense, 2)
    model.compile(optimizers.SGD(0.1), "mse", metrics=["mae", GoesOn()])
    if group is not None and group.rank == 1:
        model.predict(X, verbose=0)
    found: list[Any] = []
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    for n in range(2):
        rows = X[n * 12 : n * 12 + 12][rank::size]
        found += model.train_on_batch(rows, rows[:, :1])
    tested = model.test_on_batch(rows, rows[:, :1], return_dict=True)
    found += [value for _, value in sorted(tested.items())]
    model.save_weights(f"{folder}/by_hand.weights.h5")
    saved = model.get_weights()
    model.set_weights([own * 0 for own in saved])
    model.load_weights(f"{folder}/by_hand.weights.h5")
    found += model.evaluate(X[rank::size], Y[rank::size], 4, 0)  # by position
    if rank == 0:
        model.predict(X, verbose=0)
    model.fit(X[rank::size][:8], Y[rank::size][:8], BATCH, verbose=0, shuffle=False)
    return found, saved


def saved_again(group: Any, folder: str) -> Any:
    """Saves on rank 0 alone, and on all ranks after a fit; returns what others read."""
    model = made(group, dense, 1)
    model.compile(optimizers.SGD(0.1), "mse")
    path = f"{folder}/again.weights.h5"
    for is_of_all in (False, True):
        model.fit(X[:12], Y[:12], 6, verbose=0, shuffle=False)
        if group.rank == 0 and is_of_all:
            time.sleep(1.0)
        if group.rank == 0 or is_of_all:
            model.save_weights(path)
    read = dense()
    read.load_weights(path)
    return read.get_weights(), model.get_weights()


def statistics(group: Any) -> Any:
    """Returns validation's loss, that of evaluation, and the moving averages."""
    model = made(group, normed, 1)
    rows = X[group.rank * 16 :][:16]
    model.compile(optimizers.SGD(0.1), "mse")
    history = model.fit(
        *(rows, rows[:, :1], 8, 2),
        verbose=0,
        validation_data=(rows, rows[:, :1]),
    ).history
    averages = [own.numpy().tolist() for own in model.layers[1].non_trainable_variables]
    loss = model.evaluate(rows, rows[:, :1], 8, verbose=0)
    return history["val_loss"][-1], loss, averages


class OfFirstBatch(layers.Layer):
    """Trains what it takes from its first batch, as ActNorm does."""

    def build(self, shape: Any) -> None:
        self.shift = self.add_weight(shape=shape[-1:], initializer="zeros")
        self.known = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool | None = None) -> Any:
        if training:
            is_known = tf.convert_to_tensor(self.known) > 0
            first = -tf.reduce_mean(x, axis=0)
            self.shift.assign(tf.where(is_known, self.shift, first))
            self.known.assign(1.0)
        return x + self.shift


def first_batches(group: Any, mode: str) -> Any:
    """Returns the shifts of the last tower after each batch, and after each epoch.

    Rank 0 has one batch, the others have three.
    """

    def make() -> Any:
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input([4]), OfFirstBatch(), layers.Dense(1)])

    model = TowerModel(make, CPUS[:2], group=group, variables=mode)
    model.compile(optimizers.SGD(0.1), "mse")
    rows = X[group.rank * 16 :][: 12 if group.rank else 4]
    seen, ends = list[Any](), []

    def keep(batch: int, logs: Any = None) -> None:
        seen.append(np.array(model.towers[-1].layers[0].shift).tolist())

    keeps = callbacks.LambdaCallback(on_train_batch_end=keep)
    for _ in range(2):
        model.fit(rows, rows[:, :1], 4, verbose=0, shuffle=False, callbacks=[keeps])
        ends.append([own.tolist() for own in model.get_weights()[:1]])
    return seen, ends


class Draws(layers.Layer):
    def call(self, x: Any) -> Any:
        return keras.random.normal(keras.ops.shape(x))


class Noise(keras.Model):
    """Keeps what dropout and the generator of Keras gave in training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = [layers.Dropout(0.5), Draws()]
        self.seen = [self.add_weight(shape=[4, 16], trainable=False) for _ in range(2)]
        self.last = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.last(x)

    def train_step(self, data: Any) -> Any:
        for layer, seen in zip(self.inner, self.seen, strict=True):
            seen.assign(layer(tf.ones([4, 16]), training=True))
        return {"loss": tf.reduce_sum(self.seen[0])}


def noise(group: Any, seed: int) -> Any:
    """Returns what every tower of a rank drew in two steps, for each of two layers."""
    keras.utils.set_random_seed(seed)
    model = TowerModel(Noise, CPUS[:2], group=group)
    model.compile("sgd", "mse")
    found: list[Any] = []

    def keep(batch: int, logs: Any = None) -> None:
        # Before towers and ranks become equal.
        found.extend([own.numpy().tobytes() for own in t.seen] for t in model.towers)

    keeps = callbacks.LambdaCallback(on_train_batch_end=keep)
    model.fit(np.ones([16, 3]), np.ones([16, 1]), 8, verbose=0, callbacks=[keeps])
    return found


def resumed(group: Any, folder: str, variables: str, towers: int) -> Any:
    """Trains a model that rank 0 has loaded, and the other ranks have built."""
    path, place = Path(folder) / "model.keras", (0, 1)
    model = keras.models.load_model(path)
    if group is not None:
        assert model.weights[0].path != dense().weights[0].path
        make, place = seeded(dense, 1), (group.rank, group.size)
        if group.rank == 0:
            make = functools.partial(keras.models.load_model, path)
        model = TowerModel(make, CPUS[:towers], group=group, variables=variables)
    return run(model, {}, "", place)


def exchanged(group: Any, looks: bool) -> Any:
    """Accumulates over ranks; returns how often gradients were reduced, and what."""
    count = tf.Variable(0)

    def reduce(grads: Any) -> Any:
        count.assign_add(1)
        return sum_on_device(grads, device="/cpu:0")

    options = {} if group is None else {"reducer": reduce}
    model = made(group, dense, 2, **options)
    model.compile(accumulating(), "mse")
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    x, y = (rows_of(rank, size, own) for own in (X, Y))
    seen: list[Any] = []

    def look(batch: int, logs: Any = None) -> None:
        seen.append([v.numpy() for v in model.optimizer.variables])

    on_this = looks and (group is None or rank == 1)
    looking = [callbacks.LambdaCallback(on_train_batch_end=look)] if on_this else []
    given = {"shuffle": False, "verbose": 0, "callbacks": looking}
    model.fit(x, y, BATCH // size, 2, **given)
    return int(count), [v.numpy() for v in model.optimizer.variables], seen


class Counting(Alone):
    """A rank alone that notes what it exchanges outside of steps."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def sum(self, tensors: Any, *, names: Any = ()) -> Any:
        self.seen += names[:1] if tf.executing_eagerly() else []
        return super().sum(tensors, names=names)

    def broadcast(self, variables: Any) -> None:
        self.seen.append("variables")
        super().broadcast(variables)


def stop(group: Any, place: str, rank: int) -> Any:
    """Stops on one rank; returns the epochs of the history, and updates made."""
    model = made(group, dense, 1)
    model.compile(optimizers.SGD(0.01), "mse")

    def stop_at_one(number: int, logs: Any = None) -> None:
        if group.rank == rank and number == 1:
            model.stop_training = True

    own = [callbacks.LambdaCallback(**{place: stop_at_one})]
    x, y = (rows_of(group.rank, group.size, own) for own in (X, Y))
    history = model.fit(x, y, 6, 5, verbose=0, shuffle=False, callbacks=own)
    return len(history.history["loss"]), int(model.optimizer.iterations.numpy())


def shuffled(group: Any, folder: str) -> Any:
    """Shuffles shared arrays; returns history, weights, epochs seen, if it is saved."""
    model = made(group, dense, 2, data="shared")
    model.compile(optimizers.Adam(0.01), "mse")
    seen: list[int] = []
    shown = callbacks.LambdaCallback(on_epoch_end=lambda n, _: seen.append(n))
    history = model.fit(
        *(X[:OWN_ROWS], Y[:OWN_ROWS], BATCH, 2), callbacks=[on_rank_0(shown)]
    )
    shared = Path(folder) / "model.keras"
    model.save(shared)
    return history.history, model.get_weights(), seen, shared.exists()


class SumOfRows(layers.Layer):
    synchronized = True

    def call(self, x: Any) -> Any:
        return sum_over_towers(x)  # not of a known number of rows


def of_rows() -> keras.Model:
    return keras.Sequential([keras.Input([4]), SumOfRows(), layers.Dense(1)])


def refused(group: Any, kind: str) -> None:
    """Does what is refused."""
    options: dict[str, Any] = {}
    loss: Any = "mse"
    make = dense
    if kind.startswith("stop"):
        rows = {"stop, none": [[], [2]], "stop, a part": [[2, 2, 2], [2, 2, 2, 2]]}
        data: Any = {"x": own_batches(group, rows[kind])}
        options["uneven"] = "stop"
    elif kind == "shared":
        data = {"x": X[: 24 + 12 * group.rank], "y": Y[: 24 + 12 * group.rank]}
        data |= {"batch_size": BATCH, "shuffle": False}
        options["data"] = "shared"
    elif kind == "other rows":
        data = {"x": X + group.rank, "y": Y, "batch_size": BATCH, "shuffle": False}
        options["data"] = "shared"
    elif kind == "weights":
        data = {"x": X, "y": Y, "sample_weight": WEIGHTS, "shuffle": False}
        data["validation_data"] = X, Y, WEIGHTS
        options["data"] = "shared"
        loss = keras.losses.MeanSquaredError("mean_with_sample_weight")
    else:
        data = {"x": X, "y": Y}
        make = of_rows if kind == "synchronised, rows" else synchronized
    model = made(group, make, 1, **options)
    model.compile(
        *("sgd", loss),
        steps_per_execution=2 if kind == "stop, a part" else 1,
        run_eagerly=kind == "synchronised, eagerly",
    )
    model.fit(**data, verbose=0)


# By what differs: the values of rank 0 and of the others.
UNLIKE: dict[str, tuple[Any, Any]] = {
    "data": ("own", "shared"),
    "uneven": ("wait", "stop"),
    "steps_per_execution": (1, 2),
    "gradient_accumulation_steps": (None, 2),
    "epochs": (3, 2),
    "validation_data": (None, (X, Y)),
    "validation_split": (0.5, 0.0),
}


def unlike(group: Any, name: str) -> None:
    """Trains with a setting that differs between ranks."""
    own = {name: UNLIKE[name][min(group.rank, 1)]}
    ours = {key: own[key] for key in ("data", "uneven") if key in own}
    model = made(group, dense, 1, **ours)
    steps = own.pop("steps_per_execution", 1)
    optimizer = optimizers.SGD(
        gradient_accumulation_steps=own.pop("gradient_accumulation_steps", None)
    )
    if name == "gradient_accumulation_steps":  # within another, too
        optimizer = optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse", steps_per_execution=steps)
    fits = {key: value for key, value in own.items() if key not in ours}
    model.fit(X, Y, BATCH, verbose=0, **fits)
