"""What ranks do in ``test_fit_over_ranks``: ``fit`` of a ``TowerModel`` with a group.

Without a group the same case runs on one device, on the union of all ranks' batches.
"""

import functools
from itertools import pairwise
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tw_core.testing import CPUS
from tw_keras import TowerModel, on_rank_0
from tw_reduce import sum_on_device

layers, optimizers, callbacks = keras.layers, keras.optimizers, keras.callbacks
RANDOM = np.random.default_rng(0)
BATCH, BATCHES = 12, 4
X = RANDOM.normal(size=(BATCH * BATCHES, 4)).astype("float32")
Y = X[:, :1] * 0.5 + 0.1
WORDS = RANDOM.integers(0, 9, size=(len(X), 5))
WEIGHTS = RANDOM.random(len(X)).astype("float32")


def dense(**options: Any) -> keras.Model:
    hidden = layers.Dense(3, "tanh", **options)
    return keras.Sequential([keras.Input([4]), hidden, layers.Dense(1)])


def amplifying() -> keras.Model:
    """Has gradients of rows in float16 that are 7 times the loss's."""
    options = {"use_bias": False, "dtype": "mixed_float16"}
    last = layers.Dense(1, kernel_initializer=keras.initializers.Constant(7), **options)
    return keras.Sequential([keras.Input([4]), layers.Dense(3, **options), last])


def linear(_: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.cast(y_pred, "float32"), axis=-1)


class OfWords(keras.Model):
    """Tables of words and of positions, whose rows every tower reads.

    Words are read in two ways, of which one gives a gradient for each distinct word.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = layers.Embedding(9, 4), layers.Embedding(5, 4)
        self.last = layers.Dense(1)

    def call(self, words: Any) -> Any:
        x = self.words(words) + self.places(keras.ops.arange(5))
        bag = tf.RaggedTensor.from_tensor(words)
        table = self.words.embeddings.value
        total = tf.nn.embedding_lookup_sparse(table, bag, None, combiner="sum")
        return self.last(keras.ops.mean(x, axis=1) + total)


class TwoOptimizers(keras.Model):
    """A ``train_step`` of two updates, which logs what is no metric."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()
        self.second = optimizers.SGD(0.05)
        self.inner.layers[0].trainable = True

    def call(self, x: Any) -> Any:
        return self.inner(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        first, last = self.inner.layers
        for layer, optimizer in ((first, self.optimizer), (last, self.second)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            own = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, own), own)
        return {"loss": loss}


def spectral() -> keras.Model:
    dense = layers.SpectralNormalization(layers.Dense(3, "tanh"))
    return keras.Sequential([keras.Input([4]), dense, layers.Dense(1)])


@functools.cache
def steps() -> tf.Variable:
    return tf.Variable(0.0, name="steps")


class Counting(keras.Sequential):
    """Counts its steps, in an attribute and in a variable of all copies."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        self.count.assign_add(steps().assign_add(1.0))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2) * (1 + 0.1 * tf.sin(self.count))
        own = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, own), own)
        return {"loss": loss, "steps": steps() + 0.0, "count": self.count + 0.0}


def counting() -> keras.Model:
    steps().assign(0.0)
    model = Counting([keras.Input([4]), layers.Dense(3, "tanh"), layers.Dense(1)])
    model.count = tf.Variable(0.0, trainable=False)
    return model


class StopsInBatch(callbacks.Callback):
    """Asks to stop within an epoch, on one rank."""

    def __init__(self, rank: int, own: int) -> None:
        super().__init__()
        self.stops = rank == own

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.stops and batch == 1:
            self.model.stop_training = True


class StopsAfterEpoch(StopsInBatch):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.stops and epoch == 1:
            self.model.stop_training = True


CASES: dict[str, dict[str, Any]] = {
    "Adam": {},
    "momentum, weights": {
        "optimizer": lambda: optimizers.SGD(0.1, momentum=0.9),
        "sample_weight": WEIGHTS,
    },
    "sparse gradients": {"make": OfWords, "x": WORDS},
    "sharded": {"towers": {"variables": "sharded"}},
    "shared variables": {"towers": {"variables": "parameter_server"}},
    "flat": {"towers": {"flat_below_bytes": 1_000}},
    "losses added": {
        "make": lambda: dense(kernel_regularizer="l2"),
        "compile": {"loss": keras.losses.MeanSquaredError("sum")},
    },
    "averages, sharded": {
        "optimizer": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5),
        "towers": {"variables": "sharded"},
    },
    "spectral": {"make": spectral},
    "counting": {"make": counting, "compile": {"weighted_metrics": None}},
    "counting, shared variables": {
        "make": counting,
        "compile": {"weighted_metrics": None},
        "towers": {"variables": "parameter_server"},
    },
    "two optimizers": {
        "make": TwoOptimizers,
        "compile": {"weighted_metrics": None},  # no step of its own updates them
    },
    "accumulated": {
        "optimizer": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2)
    },
    # An epoch of four batches ends within a group.
    "accumulated, scaled": {
        "optimizer": lambda: optimizers.LossScaleOptimizer(
            optimizers.Adam(0.01, clipnorm=0.1, gradient_accumulation_steps=3),
            dynamic_growth_steps=2,
        ),
        "compile": {"steps_per_execution": 2},
    },
    "accumulated, sharded": {
        "optimizer": lambda: optimizers.Adam(
            0.01, global_clipnorm=0.1, gradient_accumulation_steps=3
        ),
        "towers": {"variables": "sharded"},
    },
    "accumulated, shared": {
        "make": OfWords,
        "x": WORDS,
        "optimizer": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=3),
        "towers": {"variables": "parameter_server"},
    },
    "accumulated, eagerly": {
        "optimizer": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3),
        "compile": {"run_eagerly": True},
    },
    "scaled losses": {
        "optimizer": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01))
    },
    "overflowing losses": {
        "make": amplifying,
        "x": np.abs(X) / 100,  # Gradients of kernels, which add rows, do not overflow.
        "compile": {"loss": linear},
        "optimizer": lambda: optimizers.LossScaleOptimizer(
            optimizers.SGD(2.0), dynamic_growth_steps=1
        ),
        "rtol": 2e-3,
    },
    "several steps in one call": {"compile": {"steps_per_execution": 3}},
    "eagerly": {"compile": {"run_eagerly": True}},
    "rates": {
        "callbacks": lambda: [
            callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=9.0)
        ]
    },
    "early": {
        "callbacks": lambda: [
            callbacks.EarlyStopping("val_loss", patience=0, min_delta=9.0)
        ]
    },
}


def rows_of(rank: int, size: int, array: np.ndarray) -> np.ndarray:
    """Returns a rank's rows of every batch."""
    batches = array.reshape(BATCHES, size, BATCH // size, *array.shape[1:])
    return batches[:, rank].reshape(-1, *array.shape[1:])


def seeded(make: Any, seed: int) -> Any:
    def made() -> Any:
        keras.utils.set_random_seed(seed)
        return make()

    return made


def fit(group: Any, name: str, towers: int, data: str = "own") -> Any:
    """Trains a case; returns its history, weights, and what evaluation gives."""
    case = CASES[name]
    make = case.get("make", dense)
    x, y, batch = case.get("x", X), Y, BATCH
    weight = case.get("sample_weight")
    if group is None:
        model = seeded(make, 0)()
    else:
        # Ranks begin with values of their own.
        options = {**case.get("towers", {}), "group": group, "data": data}
        model = TowerModel(seeded(make, group.rank), CPUS[:towers], **options)
        if data == "own":
            x, y = (rows_of(group.rank, group.size, own) for own in (x, y))
            if weight is not None:
                weight = rows_of(group.rank, group.size, weight)
            batch //= group.size
    return trained(model, case, x, y, batch, weight)


def trained(model: Any, case: Any, x: Any, y: Any, batch: int, weight: Any) -> Any:
    options = {"loss": "mse", "weighted_metrics": ["mae"], **case.get("compile", {})}
    optimizer = case.get("optimizer", lambda: optimizers.Adam(0.01))
    model.compile(optimizer(), **options)
    history = model.fit(
        *(x, y, batch, 3),
        sample_weight=weight,
        shuffle=False,
        verbose=0,
        validation_data=(x, y),
        callbacks=case.get("callbacks", list)(),
    )
    found = model.evaluate(x, y, batch_size=batch, verbose=0)
    return history.history, model.get_weights(), np.atleast_1d(found).tolist()


def resumed(group: Any, folder: str, variables: str, towers: int) -> Any:
    """Trains a model that rank 0 has loaded, and the other ranks have built."""
    path, x, y, batch = Path(folder) / "model.keras", X, Y, BATCH
    model = keras.models.load_model(path)
    if group is not None:
        assert model.weights[0].path != dense().weights[0].path
        make = seeded(dense, 1)
        if group.rank == 0:
            make = functools.partial(keras.models.load_model, path)
        options = {"group": group, "variables": variables}
        model = TowerModel(make, CPUS[:towers], **options)
        x, y = (rows_of(group.rank, group.size, own) for own in (x, y))
        batch //= group.size
    return trained(model, {}, x, y, batch, None)


UNEVEN: dict[str, dict[str, Any]] = {
    "wait": {},
    "wait, two optimizers": {"make": TwoOptimizers, "metrics": None},
    "unknown": {"is_known": False},
    "none": {"rows": [[], [4, 2]]},
    "stop": {},
    # Of five batches and one, the epoch ends within a group, and the data of one in it.
    "accumulated": {
        "rows": [[4, 6, 1, 3, 5], [3]],
        "optimizer": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3),
    },
    "accumulated, none at the end": {
        "rows": [[4, 6], [3]],
        "optimizer": lambda: optimizers.LossScaleOptimizer(
            optimizers.Adam(0.01, gradient_accumulation_steps=3)
        ),
    },
}


def uneven(group: Any, name: str, towers: int) -> Any:
    """Trains on unlike numbers of batches, of unlike numbers of rows."""
    case = UNEVEN[name]
    of_ranks = case.get("rows", [[4, 6, 1], [3]])
    make = case.get("make", dense)
    starts = np.cumsum([0, *map(len, of_ranks)])
    ends = np.cumsum([0, *[n for own in of_ranks for n in own]])
    parts = [X[a:b] for a, b in pairwise(ends)]
    own = [parts[a:b] for a, b in pairwise(starts)]
    if group is None:
        count = min if name == "stop" else max
        steps = range(count(len(batches) for batches in own))
        batches = [
            np.concatenate([mine[n] for mine in own if n < len(mine)]) for n in steps
        ]
        model = seeded(make, 0)()
    else:
        batches = own[group.rank]
        how = "stop" if name == "stop" else "wait"
        options = {"group": group, "uneven": how}
        model = TowerModel(seeded(make, group.rank), CPUS[:towers], **options)

    def generate() -> Any:
        for batch in batches:
            yield batch, batch[:, :1] * 0.5 + 0.1

    specs = (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1]))
    dataset = tf.data.Dataset.from_generator(generate, output_signature=specs)
    if group is None or case.get("is_known", True):
        count = tf.data.experimental.assert_cardinality(len(batches))
        dataset = dataset.apply(count)
    optimizer = case.get("optimizer", lambda: optimizers.Adam(0.01))()
    model.compile(optimizer, "mse", metrics=case.get("metrics", ["mae"]))
    validation = None if name == "stop" else dataset
    history = model.fit(dataset, epochs=2, verbose=0, validation_data=validation)
    return history.history, model.get_weights()


def exchanged(group: Any, looks: bool) -> Any:
    """Accumulates over ranks; returns how often gradients were reduced, and what."""
    count = tf.Variable(0)

    def reduce(grads: Any) -> Any:
        count.assign_add(1)
        return sum_on_device(grads, device="/cpu:0")

    options = {} if group is None else {"group": group, "reducer": reduce}
    towers = TowerModel(seeded(dense, 0), CPUS[: 1 if group is None else 2], **options)
    towers.compile(optimizers.Adam(0.01, gradient_accumulation_steps=3), "mse")
    x, y, batch = X, Y, BATCH
    if group is not None:
        x, y = (rows_of(group.rank, group.size, own) for own in (X, Y))
        batch //= group.size
    on_this = looks and (group is None or group.rank == 1)
    seen: list[Any] = []

    def look(batch: int, logs: Any = None) -> None:
        seen.append([v.numpy() for v in towers.optimizer.variables])

    looking = [callbacks.LambdaCallback(on_train_batch_end=look)] if on_this else []
    towers.fit(x, y, batch, 2, shuffle=False, verbose=0, callbacks=looking)
    return int(count), [v.numpy() for v in towers.optimizer.variables], seen


def stop(group: Any, kind: str, rank: int) -> Any:
    """Stops on one rank; returns the epochs of the history, and updates made."""
    model = TowerModel(seeded(dense, 0), CPUS[:1], group=group)
    model.compile(optimizers.SGD(0.01), "mse")
    own = {"batch": StopsInBatch, "epoch": StopsAfterEpoch}[kind](group.rank, rank)
    x, y = (rows_of(group.rank, group.size, own) for own in (X, Y))
    history = model.fit(x, y, 6, 5, verbose=0, shuffle=False, callbacks=[own])
    return len(history.history["loss"]), int(model.optimizer.iterations.numpy())


def shuffled(group: Any, folder: str) -> Any:
    """Shuffles shared arrays, and writes files; returns what is there, by rank."""
    place = Path(folder) / f"rank{group.rank}"
    model = TowerModel(seeded(dense, 0), CPUS[:2], group=group, data="shared")
    model.compile(optimizers.Adam(0.01), "mse")
    seen: list[int] = []
    shown = on_rank_0(
        callbacks.LambdaCallback(on_epoch_end=lambda n, _: seen.append(n))
    )
    history = model.fit(
        *(X, Y, BATCH, 2),
        callbacks=[
            callbacks.ModelCheckpoint(
                str(place / "{epoch}.weights.h5"), save_weights_only=True
            ),
            callbacks.CSVLogger(str(place.with_suffix(".csv"))),
            shown,
        ],
    )
    shared = Path(folder) / "model.keras"
    model.save(shared)
    is_there = shared.exists()
    files = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.*"))
    return history.history, model.get_weights(), seen, is_there, files


def different_data(group: Any) -> None:
    """Gives ranks that share their data different rows."""
    model = TowerModel(seeded(dense, 0), CPUS[:1], group=group, data="shared")
    model.compile(optimizers.Adam(0.01), "mse")
    model.fit(X + group.rank, Y, BATCH, 1, verbose=0, shuffle=False)
