"""What ranks do in ``test_training_over_ranks`` that is refused."""

from typing import Any

import keras
from rank_batches import own_batches
from rank_fits import dense
from rank_training import BATCH, WEIGHTS, X, Y, made, synchronized

from tw_core.synchronized import sum_over_towers


class SumOfRows(keras.layers.Layer):
    synchronized = True

    def call(self, x: Any) -> Any:
        return sum_over_towers(x)  # not of a known number of rows


def of_rows() -> keras.Model:
    return keras.Sequential([keras.Input([4]), SumOfRows(), keras.layers.Dense(1)])


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
    optimizer = keras.optimizers.SGD(
        gradient_accumulation_steps=own.pop("gradient_accumulation_steps", None)
    )
    if name == "gradient_accumulation_steps":  # within another, too
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse", steps_per_execution=steps)
    fits = {key: value for key, value in own.items() if key not in ours}
    model.fit(X, Y, BATCH, verbose=0, **fits)
