"""What ranks do in ``test_training_over_ranks``: programs as users of Keras write them.

All ranks run a program on the same data, and one device runs it as it is.
"""

import functools
import importlib
import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras_gallery import RANDOM as RANDOM_PROGRAMS
from keras_gallery import programs
from rank_fits import TwoOptimizers, dense, seeded

import tw_ampopt
from tw_core.testing import CPUS
from tw_keras import TowerModel, on_rank_0

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
    "two reductions": {
        "make": two_outputs,
        "y": [Y > 0, ONE_HOT],
        "optimizer": sgd,
        "compile": lambda: {
            "loss": [
                keras.losses.BinaryCrossentropy(reduction="sum"),
                "categorical_crossentropy",
            ]
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


def made(group: Any, make: Any, towers: int, **options: Any) -> Any:
    with _SEEDED:
        if group is None:
            return seeded(make, 0)()
        make = seeded(make, group.rank)
        return TowerModel(make, CPUS[:towers], group=group, **options)
