"""What ranks do in ``test_training_over_ranks``: programs as users of Keras write them.

All ranks run a program on the same data, and one device runs it as it is.
"""

import functools
import importlib
import threading
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras_gallery import RANDOM as RANDOM_PROGRAMS
from keras_gallery import programs
from rank_fits import TwoOptimizers, dense, seeded

import tw_ampopt
from tw_builders import TowerModel
from tw_builders.tower_model import on_rank_0
from tw_core.testing import CPUS

layers, optimizers, callbacks = keras.layers, keras.optimizers, keras.callbacks
metrics = keras.metrics
RANDOM = np.random.default_rng(1)
ROWS, BATCH = 37, 12  # the last batch has one row
X = RANDOM.normal(size=(ROWS, 4)).astype("float32")
Y = X[:, :1] * 0.5 + 0.1
KINDS = (X[:, 0] > 0.3).astype("int32") + (X[:, 1] > 0)
ONE_HOT = np.eye(3, dtype="float32")[KINDS]
WEIGHTS = RANDOM.random(ROWS).astype("float32") + 0.1


def classes() -> keras.Model:
    hidden = layers.Dense(5, "tanh")
    last = layers.Dense(3, activation="softmax")
    return keras.Sequential([keras.Input([4]), hidden, last])


def two_outputs() -> keras.Model:
    x = keras.Input([4])
    first = layers.Dense(1, "sigmoid", name="first")(x)
    return keras.Model(x, [first, layers.Dense(3, "softmax", name="second")(x)])


def normed() -> keras.Model:
    inner = [layers.Dense(3), layers.BatchNormalization(momentum=0.5)]
    return keras.Sequential([keras.Input([4]), *inner, layers.Dense(1)])


def synchronized() -> keras.Model:
    def linear() -> Any:
        return layers.Dense(3, use_bias=False)  # whose gradient would be noise

    norm = layers.BatchNormalization(momentum=0.5, synchronized=True)
    again = layers.BatchNormalization(momentum=0.5, synchronized=True)
    inner = [linear(), norm, layers.Activation("tanh"), linear(), again]
    return keras.Sequential([keras.Input([4]), *inner, layers.Dense(1)])


def sgd() -> Any:
    """Does not count updates, of which plain Keras counts too many at the end."""
    return optimizers.SGD(0.05)


def momentum() -> Any:
    return optimizers.SGD(0.05, momentum=0.9)


def averaging() -> Any:
    return optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5)


class Largest(metrics.MeanMetricWrapper):
    """A mean of one's own."""

    def __init__(self) -> None:
        super().__init__(lambda y, p: keras.ops.max(abs(y - p), axis=-1), "largest")


class GoesOn(Largest):
    """A metric that no epoch resets."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "goes_on"

    def reset_state(self) -> None:
        pass


class Sequence(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, n: int) -> Any:
        return X[n * 7 : n * 7 + 7], Y[n * 7 : n * 7 + 7]


class Halves(callbacks.Callback):
    """Sets weights between batches, and those of a layer between epochs."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self.model.set_weights([own / 2 for own in self.model.get_weights()])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        kernel = self.model.layers[0].kernel
        kernel.assign(kernel * 0.5)


class Evaluates(callbacks.Callback):
    """Evaluates and predicts within ``fit``."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.evaluate(X, Y, batch_size=9, verbose=0)
        self.model.predict(X, verbose=0)


def generated() -> Any:
    for n in range(9):
        yield X[n * 4 : n * 4 + 4], Y[n * 4 : n * 4 + 4]


def dataset() -> Any:
    specs = (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1]))
    return tf.data.Dataset.from_generator(generated, output_signature=specs)


def all_kinds() -> list[Any]:
    return [
        *("accuracy", metrics.AUC(num_thresholds=20), metrics.Precision()),
        *(metrics.Recall(), metrics.F1Score(), metrics.TopKCategoricalAccuracy(2)),
        *(metrics.OneHotMeanIoU(3), metrics.R2Score(), Largest()),
        *(metrics.AUC(multi_label=True, name="of_labels", num_thresholds=9),),
        *(metrics.SensitivityAtSpecificity(0.5), metrics.KLDivergence()),
        *(metrics.CosineSimilarity(), metrics.RootMeanSquaredError()),
    ]


def freeze_first(model: Any) -> None:
    model.layers[0].trainable = False


_SEEDED = threading.Lock()  # for ranks that are threads
# A program compiles a model and fits it, once or several times.
CASES: dict[str, dict[str, Any]] = {
    "metrics": {
        "make": classes,
        "y": ONE_HOT,
        "compile": lambda: {
            "loss": "categorical_crossentropy",
            "metrics": [*all_kinds(), GoesOn()],
            "weighted_metrics": [metrics.MeanAbsoluteError()],
        },
        "fit": {"sample_weight": WEIGHTS},
    },
    "two outputs": {
        "make": two_outputs,
        "y": [Y > 0, ONE_HOT],
        "compile": lambda: {
            "loss": ["binary_crossentropy", "categorical_crossentropy"],
            "loss_weights": [1.0, 0.5],
            "metrics": [["accuracy", metrics.AUC(name="auc")], [metrics.F1Score()]],
        },
    },
    "classes weighed": {
        "make": classes,
        "y": KINDS,
        "compile": lambda: {"loss": "sparse_categorical_crossentropy"},
        "fit": {"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}},
    },
    "synchronised": {"make": synchronized, "is_close": 2e-5},
    "synchronised, losses added": {
        "make": synchronized,
        "optimizer": lambda: optimizers.SGD(0.002),
        "compile": lambda: {"loss": keras.losses.MeanSquaredError("sum")},
        "is_close": 2e-5,
    },
    "synchronised, several steps in one call": {
        "make": synchronized,
        "compile": lambda: {"loss": "mse", "steps_per_execution": 2},
        "is_close": 2e-5,
    },
    "synchronised, compiled by XLA": {
        "make": synchronized,
        "compile": lambda: {"loss": "mse", "jit_compile": True},
        "is_close": 2e-5,
    },
    "part for validation": {"fit": {"validation_split": 0.3}},
    "steps of an epoch": {
        "x": dataset,
        "fit": {"steps_per_epoch": 2},
        "optimizer": sgd,
    },
    "unknown length": {"x": dataset, "optimizer": sgd},
    "unknown length, several steps in one call": {
        "x": dataset,
        "optimizer": sgd,
        "compile": lambda: {"loss": "mse", "steps_per_execution": 2},
    },
    "generator": {"x": generated, "optimizer": sgd, "fit": {"steps_per_epoch": 3}},
    "sequence": {"x": lambda: Sequence()},
    "compiled by XLA": {"compile": lambda: {"loss": "mse", "jit_compile": True}},
    "float16": {"policy": "mixed_float16", "is_close": 2e-2},
    "over towers": {"over_towers": True, "optimizer": momentum},
    "twice": {"fits": 2},
    "compiled again": {"fits": 2, "between": freeze_first},
    "eagerly": {"compile": lambda: {"loss": "mse", "run_eagerly": True}},
    "two optimizers": {"make": TwoOptimizers, "compile": lambda: {"loss": "mse"}},
    "weights of a sum": {
        "compile": lambda: {"loss": keras.losses.MeanSquaredError("sum")},
        "fit": {"sample_weight": WEIGHTS},
    },
    # Callbacks
    "stops early": {
        "callbacks": lambda _: [
            callbacks.EarlyStopping(
                "val_loss", patience=1, min_delta=9.0, restore_best_weights=True
            )
        ]
    },
    "plateau": {
        "callbacks": lambda _: [
            callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=9.0)
        ]
    },
    "schedule": {
        "callbacks": lambda _: [
            callbacks.LearningRateScheduler(lambda n, rate: rate / (n + 1))
        ]
    },
    "files": {
        "callbacks": lambda folder: [
            callbacks.ModelCheckpoint(f"{folder}/best.keras", save_best_only=True),
            callbacks.ModelCheckpoint(
                f"{folder}/{{batch}}.weights.h5", save_weights_only=True, save_freq=3
            ),
            callbacks.CSVLogger(f"{folder}/log.csv"),
            callbacks.TensorBoard(f"{folder}/board", update_freq=1),
            callbacks.BackupAndRestore(f"{folder}/backup", save_freq=2),
        ]
    },
    "functions": {
        "callbacks": lambda _: [
            callbacks.LambdaCallback(on_epoch_end=lambda n, logs: logs["loss"]),
            callbacks.TerminateOnNaN(),
        ]
    },
    "swapped averages": {
        "optimizer": averaging,
        "callbacks": lambda _: [callbacks.SwapEMAWeights(swap_on_epoch=True)],
    },
    "sets weights": {"callbacks": lambda _: [Halves()]},
    "evaluates": {"callbacks": lambda _: [Evaluates()]},
    "on rank 0": {
        "callbacks": lambda _: [on_rank_0(callbacks.LambdaCallback())],
        "plain_callbacks": lambda _: [callbacks.Callback()],
    },
}


def train(
    group: Any, name: str, towers: int, folder: str = "", **options: Any
) -> tuple[Any, Any, Any]:
    """Trains a case; returns its history, weights, and what evaluation gives."""
    case = CASES[name]
    make = case.get("make", dense)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(case.get("policy", "float32"))
    try:
        with _SEEDED:
            if group is None:
                model = seeded(make, 0)()
            else:
                options = {"group": group, "data": "shared", **options}
                model = TowerModel(seeded(make, group.rank), CPUS[:towers], **options)
            keras.utils.set_random_seed(3)
        return run(model, case, folder)
    finally:
        keras.config.set_dtype_policy(before)


def run(model: Any, case: Any, folder: str) -> tuple[Any, Any, Any]:
    x, y = case.get("x", X), case.get("y", Y)
    make_callbacks = case.get("callbacks", lambda _: [])
    if not isinstance(model, TowerModel):
        make_callbacks = case.get("plain_callbacks", make_callbacks)
    history: dict[str, list[float]] = {}
    for n in range(case.get("fits", 1)):
        options = case.get("compile", lambda: {"loss": "mse", "metrics": ["mae"]})()
        optimizer = case.get("optimizer", lambda: optimizers.Adam(0.01))()
        if case.get("over_towers") and isinstance(model, TowerModel):
            optimizer = over_towers(model)
        if n == 0 or "between" in case:
            model.compile(optimizer, **options)
        data = {"x": x() if callable(x) else x}
        if not callable(x):
            data |= {"y": y, "batch_size": BATCH}
        given = {
            "epochs": 3,
            "verbose": 0,
            "shuffle": False,
            **data,
            **case.get("fit", {}),
        }
        own = make_callbacks(folder)
        if own:
            given |= {"validation_data": (X, Y), "callbacks": own}
        found = model.fit(**given).history
        for key, values in found.items():
            history[key] = history.get(key, []) + values
        case.get("between", lambda model: None)(model)
    data = (X, y) if not callable(x) else (X, Y)
    evaluated = model.evaluate(*data, batch_size=9, verbose=0, return_dict=True)
    predicted = tf.nest.flatten(model.predict(X, verbose=0))
    return history, model.get_weights(), [*evaluated.values(), *predicted]


def over_towers(model: Any) -> Any:
    return tw_ampopt.TowerOptimizer(
        [tower.trainable_variables for tower in model.towers],
        tf_optimizer=tf.compat.v1.train.MomentumOptimizer,
        learning_rate=0.05,
        momentum=0.9,
        loss_scale=tw_ampopt.DynamicLossScale(),
    )


def gallery(group: Any, name: str, towers: int, settings: Any) -> Any:
    """Runs a program of the gallery, as it is, on shared data."""
    is_exact = name not in RANDOM_PROGRAMS
    with programs("float64" if is_exact else "float32"):
        program = importlib.import_module(name)
        own = functools.partial(TowerModel, group=group, data="shared")
        before, program.TowerModel = program.TowerModel, own
        try:
            return program.main(towers, **settings)
        finally:
            program.TowerModel = before
            keras.config.set_dtype_policy("float32")


# Of batches that each rank has of its own: rows by batch and rank, for each fit.
OWN: dict[str, dict[str, Any]] = {
    "compiled again": {
        "fits": [[[4, 6, 1], [3]], [[4], [2, 3]]],
        "between": freeze_first,
    },
    "no batch, eagerly": {"fits": [[[], [4, 2]]], "compile": {"run_eagerly": True}},
    "no batch at first": {"fits": [[[], [4, 2]], [[4, 2], [3]], [[4, 2], []]]},
    "synchronised, rank 0 first": {"make": synchronized, "fits": [[[4], [6, 3, 1]]]},
    "synchronised, rank 1 first": {
        "make": synchronized,
        "fits": [[[6, 3, 1], [4]], [[4, 2], [3]]],
        "between": freeze_first,
    },
    "synchronised, no batch": {"make": synchronized, "fits": [[[], [4, 2]]]},
    "synchronised, no rows": {"make": synchronized, "fits": [[[0, 3, 2], [4, 0]]]},
    "synchronised, several steps in one call": {
        "make": synchronized,
        "is_close": 2e-5,  # variances of few rows
        "fits": [[[6, 5, 7, 4, 6], [5, 4]]],
        "compile": {"steps_per_execution": 2},
    },
    "no rows": {"fits": [[[0, 3, 2], [4, 0]]]},
    "several steps in one call": {
        "fits": [[[3, 2, 4, 1, 2], [4, 2]]],
        "compile": {"steps_per_execution": 2},
    },
    "steps until one stops": {
        "fits": [[[3, 2, 4], [4, 2, 1]]],
        "uneven": "stop",
        "steps": [3, 2],
    },
    "as many steps": {
        "fits": [[[3, 2, 4, 1], [4, 2, 1, 2]]],
        "uneven": "stop",
        "steps": [2, 2],
    },
}


def own_batches(group: Any, of_ranks: Any, *, is_known: bool = True) -> Any:
    """Returns a rank's batches, or those of one device: all ranks' joined."""
    ends = iter(np.cumsum([n for own in of_ranks for n in own]))
    parts = [
        [X[end - n : end] for n, end in zip(own, ends, strict=False)]
        for own in of_ranks
    ]
    if group is None:
        steps = range(max(map(len, parts)))
        batches = [
            np.concatenate([own[n] for own in parts if n < len(own)]) for n in steps
        ]
    else:
        batches = parts[group.rank]

    def generate() -> Any:
        for batch in batches:
            yield batch, batch[:, :1] * 0.5 + 0.1

    specs = (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1]))
    made = tf.data.Dataset.from_generator(generate, output_signature=specs)
    if not is_known:
        return made
    return made.apply(tf.data.experimental.assert_cardinality(len(batches)))


def made(group: Any, make: Any, towers: int, **options: Any) -> Any:
    with _SEEDED:
        if group is None:
            return seeded(make, 0)()
        make = seeded(make, group.rank)
        return TowerModel(make, CPUS[:towers], group=group, **options)


def on_own(group: Any, name: str, towers: int) -> Any:
    """Trains a case of ``OWN``; returns its losses and weights."""
    case = OWN[name]
    make, uneven = case.get("make", dense), case.get("uneven", "wait")
    model = made(group, make, towers, uneven=uneven)
    losses: list[float] = []
    for n, of_ranks in enumerate(case["fits"]):
        options = {"loss": "mse", **case.get("compile", {})}
        if group is None:
            options.pop("steps_per_execution", None)
        if n == 0 or "between" in case:
            model.compile(optimizers.SGD(0.1 * (n + 1)), **options)
        data, steps = own_batches(group, of_ranks), case.get("steps")
        if steps is not None:
            data = data.repeat()
            steps = min(steps) if group is None else steps[group.rank]
        found = model.fit(data, epochs=2, steps_per_epoch=steps, verbose=0)
        losses += found.history["loss"]
        case.get("between", lambda model: None)(model)
    return losses, model.get_weights()


def on_any(group: Any, of_ranks: Any, towers: int, is_known: bool) -> Any:
    """Trains and validates on unlike numbers of batches; as ``on_own``."""
    model = made(group, dense, towers)
    model.compile(sgd(), "mse", metrics=["mae"])
    data = own_batches(group, of_ranks, is_known=is_known)
    history = model.fit(data, epochs=2, verbose=0, validation_data=data).history
    return [*history.values()], model.get_weights()


# What is not a whole history.


class Fails(callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise RuntimeError("interrupted")


def interrupted(group: Any, folder: str) -> Any:
    """Trains until it is interrupted, and goes on with a new model from the backup."""
    for own in ([Fails()], []):
        model = made(group, normed, 2, **({} if group is None else {"data": "shared"}))
        model.compile(optimizers.Adam(0.01), "mse")
        backup = callbacks.BackupAndRestore(folder)
        try:
            history = model.fit(
                *(X, Y, BATCH, 4), verbose=0, shuffle=False, callbacks=[backup, *own]
            )
        except RuntimeError:
            continue
    return history.epoch, model.trainable_variables[0].numpy().tolist()


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


class Keeps(callbacks.Callback):
    """Keeps what every tower saw, before towers and ranks become equal."""

    def __init__(self, towers: Any) -> None:
        super().__init__()
        self.towers, self.seen = towers, []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen += [
            [own.numpy().tobytes() for own in tower.seen] for tower in self.towers
        ]


def noise(group: Any, seed: int) -> Any:
    """Returns what every tower of a rank drew in two steps, for each of two layers."""
    keras.utils.set_random_seed(seed)
    model = TowerModel(Noise, CPUS[:2], group=group)
    model.compile("sgd", "mse")
    keeps = Keeps(model.towers)
    model.fit(np.ones([16, 3]), np.ones([16, 1]), 8, verbose=0, callbacks=[keeps])
    return keeps.seen
