"""What ranks do in ``test_training_over_ranks``: programs as users of Keras write them.

All ranks run a program on the same data, or each on its rows of every batch; without a
group one device runs it as it is.
"""

import functools
import importlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from harness.recording import Recording

import tw_ampopt
import tw_core
from programs.keras_gallery import programs
from tw_core.testing import CPUS
from tw_keras import TowerModel, on_rank_0

layers, optimizers, callbacks = keras.layers, keras.optimizers, keras.callbacks
metrics = keras.metrics
RANDOM = np.random.default_rng(1)
BATCH, BATCHES = 12, 4
OWN_ROWS = BATCH * BATCHES
ROWS = OWN_ROWS + 1  # the last batch of shared data has one row
X = RANDOM.normal(size=(ROWS, 4)).astype("float32")
Y = X[:, :1] * 0.5 + 0.1
KINDS = (X[:, 0] > 0.3).astype("int32") + (X[:, 1] > 0)
ONE_HOT = np.eye(3, dtype="float32")[KINDS]
WEIGHTS = RANDOM.random(ROWS).astype("float32") + 0.1
WORDS = RANDOM.integers(0, 9, size=(ROWS, 5))


def dense(**options: Any) -> keras.Model:
    hidden = layers.Dense(3, "tanh", **options)
    return keras.Sequential([keras.Input([4]), hidden, layers.Dense(1)])


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

    def norm() -> Any:
        return layers.BatchNormalization(momentum=0.5, synchronized=True)

    inner = [linear(), norm(), layers.Activation("tanh"), linear(), norm()]
    return keras.Sequential([keras.Input([4]), *inner, layers.Dense(1)])


def spectral() -> keras.Model:
    inner = layers.SpectralNormalization(layers.Dense(3, "tanh"))
    return keras.Sequential([keras.Input([4]), inner, layers.Dense(1)])


def recording() -> keras.Model:
    own = [layers.Dense(3, "tanh"), Recording(), layers.Dense(1)]
    return keras.Sequential([keras.Input([4]), Recording(), *own])


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


def sgd() -> Any:
    """Does not count updates, of which plain Keras counts too many at the end."""
    return optimizers.SGD(0.05)


def momentum() -> Any:
    return optimizers.SGD(0.05, momentum=0.9)


def averaging() -> Any:
    return optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5)


def accumulating(steps: int = 3, **options: Any) -> Any:
    """Of four batches and groups of three, an epoch ends within a group."""
    return optimizers.Adam(0.01, gradient_accumulation_steps=steps, **options)


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


def compiling(loss: Any = "mse", **options: Any) -> Any:
    return lambda: {"loss": loss, **options}


def in_shards(case: dict[str, Any]) -> dict[str, Any]:
    return {**case, "towers": {"variables": "sharded"}}


# A program compiles a model and fits it, once or several times.
SHARED: dict[str, dict[str, Any]] = {
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
        "compile": compiling("sparse_categorical_crossentropy"),
        "fit": {"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}},
    },
    # Variances of few rows, by whose roots rounding is divided.
    "synchronised": {"make": synchronized, "is_close": 2e-5},
    "synchronised, losses added": {
        "make": synchronized,
        "optimizer": lambda: optimizers.SGD(0.002),
        "compile": compiling(keras.losses.MeanSquaredError("sum")),
        "is_close": 2e-5,
    },
    "synchronised, compiled by XLA": {
        "make": synchronized,
        "compile": compiling(jit_compile=True),
        "is_close": 2e-5,
    },
    "part for validation": {"fit": {"validation_split": 0.3}},
    "steps of an epoch": {
        "x": dataset,
        "fit": {"steps_per_epoch": 2},
        "optimizer": sgd,
    },
    "unknown length, several steps in one call": {
        "x": dataset,
        "optimizer": sgd,
        "compile": compiling(steps_per_execution=2),
    },
    "generator": {"x": generated, "optimizer": sgd, "fit": {"steps_per_epoch": 3}},
    "sequence": {"x": lambda: Sequence()},
    "compiled by XLA": {"compile": compiling(jit_compile=True)},
    "float16": {"policy": "mixed_float16", "is_close": 2e-2},
    "averaged after every step": {"optimizer": sgd, "towers": {"local_steps": 1}},
    "over towers": {"over_towers": True, "optimizer": momentum},
    "twice": {"fits": 2},
    "compiled again": {"fits": 2, "between": freeze_first},
    "weights of a sum": {
        "compile": compiling(keras.losses.MeanSquaredError("sum")),
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
            callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=9.0),
            callbacks.LearningRateScheduler(lambda n, rate: rate / (n + 1)),
            callbacks.LambdaCallback(on_epoch_end=lambda n, logs: logs["loss"]),
            callbacks.TerminateOnNaN(),
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
# Of these each rank has rows of its own.
OWN: dict[str, dict[str, Any]] = {
    "Adam": {},
    "momentum, weights": {
        "optimizer": momentum,
        "compile": compiling(weighted_metrics=["mae"]),
        "fit": {"sample_weight": WEIGHTS},
    },
    "sparse gradients": {"make": OfWords, "x": WORDS},
    "sharded": {"towers": {"variables": "sharded"}},
    "shared variables": {"towers": {"variables": "parameter_server"}},
    "losses added": {
        "make": lambda: dense(kernel_regularizer="l2"),
        "compile": compiling(keras.losses.MeanSquaredError("sum")),
    },
    "averages, sharded": {
        "optimizer": averaging,
        "towers": {"variables": "sharded"},
    },
    "spectral": {"make": spectral},
    "recorded": {"make": recording, "optimizer": accumulating},
    "recorded, losses added": {
        "make": recording,
        "optimizer": sgd,
        "compile": compiling(keras.losses.MeanSquaredError("sum")),
    },
    "counting": {"make": counting, "compile": compiling()},
    "counting, shared variables": {
        "make": counting,
        "compile": compiling(),
        "towers": {"variables": "parameter_server"},
    },
    "two optimizers": {"make": TwoOptimizers, "compile": compiling()},
    "accumulated": {"optimizer": functools.partial(accumulating, 2)},
    "accumulated, scaled": {
        "optimizer": lambda: optimizers.LossScaleOptimizer(
            accumulating(clipnorm=0.1), dynamic_growth_steps=2
        ),
        "compile": compiling(steps_per_execution=2),
    },
    "accumulated, sharded": {
        "optimizer": lambda: accumulating(global_clipnorm=0.1),
        "towers": {"variables": "sharded"},
    },
    "accumulated, shared": {
        "make": OfWords,
        "x": WORDS,
        "optimizer": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=3),
        "towers": {"variables": "parameter_server"},
    },
    "accumulated, eagerly": {
        "optimizer": accumulating,
        "compile": compiling(run_eagerly=True),
    },
    "scaled losses": {
        "optimizer": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01))
    },
    "overflowing losses": {
        "make": amplifying,
        "x": np.abs(X) / 100,  # Gradients of kernels, which add rows, do not overflow.
        "compile": compiling(linear),
        "optimizer": lambda: optimizers.LossScaleOptimizer(
            optimizers.SGD(2.0), dynamic_growth_steps=1
        ),
        "is_close": 2e-3,
    },
    "several steps in one call": {"compile": compiling(steps_per_execution=3)},
    "eagerly": {"compile": compiling(run_eagerly=True)},
}
# With the optimizer's state in shards over ranks, too.
IN_SHARDS = [
    *("sparse gradients", "two optimizers", "several steps in one call", "eagerly"),
    *("accumulated", "accumulated, scaled", "overflowing losses", "counting"),
    *("losses added", "float16", "compiled by XLA", "stops early", "synchronised"),
    *("evaluates", "compiled again", "momentum, weights", "recorded"),
]
OWN |= {f"{name} in shards": in_shards(OWN[name]) for name in IN_SHARDS if name in OWN}
SHARED |= {
    f"{name} in shards": in_shards(SHARED[name]) for name in IN_SHARDS if name in SHARED
}
CASES = SHARED | OWN


def rows_of(rank: int, size: int, array: Any) -> Any:
    """Returns a rank's rows of every batch."""
    batches = array[:OWN_ROWS].reshape(BATCHES, size, BATCH // size, *array.shape[1:])
    return batches[:, rank].reshape(-1, *array.shape[1:])


def seeded(make: Any, seed: int) -> Any:
    def made() -> Any:
        keras.utils.set_random_seed(seed)
        return make()

    return made


def made(group: Any, make: Any, towers: int, **options: Any) -> Any:
    """Makes a model, on each rank with values and names of its own to begin with."""
    if group is None:
        return seeded(make, 0)()
    make = seeded(make, group.rank)
    for _ in range(group.rank):
        dense()  # Keras numbers the names of the next.
    return TowerModel(make, CPUS[:towers], group=group, **options)


def train(group: Any, name: str, towers: int, folder: str = "") -> tuple[Any, Any, Any]:
    """Trains a case; returns its history, weights, and what evaluation gives."""
    case = CASES[name]
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(case.get("policy", "float32"))
    own = {"data": "own" if name in OWN else "shared", **case.get("towers", {})}
    try:
        model = made(group, case.get("make", dense), towers, **own)
        keras.utils.set_random_seed(3)
        place = (0, 1) if group is None else (group.rank, group.size)
        return run(model, case, folder, place if name in OWN else None)
    finally:
        keras.config.set_dtype_policy(before)


def run(model: Any, case: Any, folder: str, place: Any = None) -> tuple[Any, Any, Any]:
    """Trains and evaluates; by its place a rank has rows of its own."""
    x, y, batch = case.get("x", X), case.get("y", Y), BATCH
    fit = {"shuffle": False, **case.get("fit", {})}
    if place is not None:
        rank, size = place
        x, y, batch = rows_of(rank, size, x), rows_of(rank, size, y), BATCH // size
        if "sample_weight" in fit:
            fit["sample_weight"] = rows_of(rank, size, fit["sample_weight"])
    data = {"x": x()} if callable(x) else {"x": x, "y": y, "batch_size": batch}
    tested = (X, Y) if callable(x) else (x, y)
    make_callbacks = case.get("callbacks", lambda _: [])
    if not isinstance(model, TowerModel):
        make_callbacks = case.get("plain_callbacks", make_callbacks)
    history: dict[str, list[float]] = {}
    for n in range(case.get("fits", 1)):
        optimizer = case.get("optimizer", lambda: optimizers.Adam(0.01))()
        if case.get("over_towers") and isinstance(model, TowerModel):
            optimizer = over_towers(model, loss_scale=tw_ampopt.DynamicLossScale())
        if n == 0 or "between" in case:
            model.compile(
                optimizer, **case.get("compile", compiling(metrics=["mae"]))()
            )
        own = make_callbacks(folder)
        if own or place is not None:
            fit |= {"validation_data": tested, "callbacks": own}
        for key, values in model.fit(
            **data, **fit, epochs=3, verbose=0
        ).history.items():
            history[key] = history.get(key, []) + values
        case.get("between", lambda model: None)(model)
    evaluated = model.evaluate(*tested, batch_size=batch, verbose=0, return_dict=True)
    whole = case.get("x", X)
    predicted = model.predict(X if callable(whole) else whole, verbose=0)
    found = [*evaluated.values(), *tf.nest.flatten(predicted)]
    return history, model.get_weights(), found


def over_towers(model: Any, steps: Any = None, **options: Any) -> Any:
    """Makes an optimizer of all towers' variables, which accumulates over steps."""
    lists: Any = [own.trainable_variables for own in model.towers]
    if lists[0][0] is lists[-1][0]:
        lists = lists[0]
    return tw_ampopt.TowerOptimizer(
        lists,
        towers=tw_core.towers(model.devices),
        tf_optimizer=tf.compat.v1.train.MomentumOptimizer,
        learning_rate=0.05,
        momentum=0.9,
        accumulation_steps=steps,
        **options,
    )


def gallery(group: Any, name: str, towers: int, settings: Any) -> Any:
    """Runs a program of the gallery, as it is, on shared data."""
    with programs("float64"):
        program = importlib.import_module(name)
        own = functools.partial(TowerModel, group=group, data="shared")
        before, program.TowerModel = program.TowerModel, own
        try:
            return program.main(towers, **settings)
        finally:
            program.TowerModel = before
            keras.config.set_dtype_policy("float32")
