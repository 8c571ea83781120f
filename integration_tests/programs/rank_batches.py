"""What ranks do in ``test_training_over_ranks`` with batches of their own.

One device trains on all ranks' batches, joined.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import losses

from programs.batch_losses import cosine
from programs.rank_training import (
    TwoOptimizers,
    X,
    accumulating,
    dense,
    freeze_first,
    made,
    optimizers,
    recording,
    sgd,
    synchronized,
)
from tw_keras import LocalSteps


def two_outputs() -> keras.Model:
    x = keras.Input([4])
    ends = [keras.layers.Dense(1, name=name)(x) for name in ("first", "second")]
    return keras.Model(x, ends)


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
    "of the batch": {
        "fits": [[[4, 6, 1], [3]], [[], [4, 2]], [[4], [6, 3, 1]]],
        "compile": {"loss": cosine},
    },
    "of the batch, no rows": {
        "fits": [[[0, 3, 2], [4, 0]]],
        "compile": {"loss": cosine},
    },
    "of the batch, several steps in one call": {
        "fits": [[[6, 5, 7, 4, 6], [5, 4]]],
        "compile": {"loss": cosine, "steps_per_execution": 2},
    },
    "of the batch, scaled": {
        "fits": [[[4, 6, 1], [3]]],
        "optimizer": lambda: optimizers.LossScaleOptimizer(accumulating()),
        "compile": {"loss": cosine, "jit_compile": True},
    },
    "two outputs": {
        "make": two_outputs,
        "targets": 2,
        "fits": [[[1, 6, 2], [5, 2]]],
        "compile": {"loss": ["mse", "mse"], "loss_weights": [1.0, 0.5]},
    },
    "recorded": {"make": recording, "fits": [[[1, 6, 2], [5]], [[], [4, 2]]]},
    "recorded, of a sum": {
        "make": recording,
        "fits": [[[], [4, 2]], [[1, 6, 2], [5, 2]]],
        "compile": {"loss": losses.MeanSquaredError("sum")},
        "loss_reduction": "sum",
        "optimizer": lambda: optimizers.SGD(0.01),
    },
    "a loss that is summed": {
        "fits": [[[1, 6, 2], [5, 2]]],
        "compile": {"loss": losses.MeanSquaredError("sum")},
        "loss_reduction": "sum",
    },
    "divided by weights": {
        "weighs": True,
        "fits": [[[1, 6, 2], [5, 2]], [[], [4, 2]]],
        "compile": {"loss": losses.MeanSquaredError("mean_with_sample_weight")},
    },
    "validated, of an unknown number": {
        "fits": [[[4, 6, 1], [3]]],
        "is_known": False,
        "validates": True,
        "compile": {"metrics": ["mae"]},
    },
    "two optimizers": {
        "make": TwoOptimizers,
        "fits": [[[4, 6, 1], [3]]],
        "validates": True,
    },
    # Of five batches and one, the epoch ends within a group, and the data of one in it.
    "accumulated": {
        "fits": [[[4, 6, 1, 3, 5], [3]]],
        "optimizer": accumulating,
        "validates": True,
    },
    "accumulated, none at the end": {
        "fits": [[[4, 6], [3]]],
        "optimizer": lambda: optimizers.LossScaleOptimizer(accumulating()),
    },
    "accumulated, eagerly": {
        "fits": [[[4, 6, 1, 3, 5], [3]], [[], [4, 2, 1, 3]]],
        "optimizer": accumulating,
        "compile": {"run_eagerly": True},
    },
    # Of updates that are linear in gradients, the mean is that of all ranks' rows.
    "averaged after every step": {
        "fits": [[[4, 6, 1, 2], [3, 5]], [[], [4, 2]]],
        "optimizer": lambda: optimizers.SGD(0.05, momentum=0.9),
        "local_steps": LocalSteps(1, state="averaged"),
        "validates": True,
    },
    "averaged, of an unknown number": {
        "fits": [[[4, 6, 1], [3]]],
        "is_known": False,
        "local_steps": 1,
    },
    "averaged until one stops": {
        "fits": [[[4, 6, 1], [3, 2]]],
        "uneven": "stop",
        "local_steps": 1,
    },
    "until one stops": {"fits": [[[4, 6, 1], [3]]], "uneven": "stop"},
    "several steps in one call": {
        "fits": [[[3, 2, 4, 1, 2], [4, 2]]],
        "compile": {"steps_per_execution": 2},
    },
    "steps until one stops": {
        "fits": [[[3, 2, 4], [4, 2, 1]]],
        "uneven": "stop",
        "steps": [3, 2],
    },
}


for _name in (
    *("recorded", "compiled again", "no batch at first", "no rows", "of the batch"),
    "until one stops",
):
    OWN[f"{_name} in shards"] = {**OWN[_name], "variables": "sharded"}


def own_batches(
    group: Any,
    of_ranks: Any,
    *,
    is_known: bool = True,
    targets: int = 1,
    weighs: bool = False,
    until: Any = max,
) -> Any:
    """Returns a rank's batches, or those of one device: all ranks' joined."""
    ends = iter(np.cumsum([n for own in of_ranks for n in own]))
    parts = [
        [X[end - n : end] for n, end in zip(own, ends, strict=False)]
        for own in of_ranks
    ]
    if group is None:
        steps = range(until(map(len, parts)))
        batches = [
            np.concatenate([own[n] for own in parts if n < len(own)]) for n in steps
        ]
    else:
        batches = parts[group.rank]

    def generate() -> Any:
        for batch in batches:
            every = [batch[:, n : n + 1] * 0.5 + 0.1 for n in range(targets)]
            target = every[0] if targets == 1 else tuple(every)
            yield (batch, target, 1.5 + batch[:, 3]) if weighs else (batch, target)

    spec = tf.TensorSpec([None, 1])
    specs = tf.TensorSpec([None, 4]), spec if targets == 1 else (spec,) * targets
    specs += (tf.TensorSpec([None]),) if weighs else ()
    made = tf.data.Dataset.from_generator(generate, output_signature=specs)
    if not is_known:
        return made
    return made.apply(tf.data.experimental.assert_cardinality(len(batches)))


def on_own(group: Any, name: str, towers: int) -> Any:
    """Trains a case of ``OWN``; returns its losses and weights."""
    case = OWN[name]
    own = ("uneven", "loss_reduction", "local_steps", "variables")
    options = {key: case[key] for key in own if key in case and group is not None}
    model = made(group, case.get("make", dense), towers, **options)
    kinds = {k: case[k] for k in ("targets", "weighs", "is_known") if k in case}
    kinds["until"] = min if "uneven" in case else max
    if group is None:
        kinds["is_known"] = True
    shown: list[float] = []
    for n, of_ranks in enumerate(case["fits"]):
        compiles = {"loss": "mse", **case.get("compile", {})}
        if group is None:
            compiles.pop("steps_per_execution", None)
        if n == 0 or "between" in case:
            optimizer = case.get("optimizer", lambda n=n: optimizers.SGD(0.1 * (n + 1)))
            model.compile(optimizer(), **compiles)
        data, steps = own_batches(group, of_ranks, **kinds), case.get("steps")
        given = {"validation_data": data} if "validates" in case else {}
        if steps is not None:
            data = data.repeat()
            steps = min(steps) if group is None else steps[group.rank]
        given |= {"epochs": 2, "steps_per_epoch": steps, "verbose": 0}
        found = model.fit(data, **given).history
        shown += [value for key in found for value in found[key]]
        case.get("between", lambda model: None)(model)
    return shown, model.get_weights()


def on_any(
    group: Any, of_ranks: Any, towers: int, is_known: bool, kind: str = "replicated"
) -> Any:
    """Trains and validates on unlike numbers of batches; as ``on_own``."""
    model = made(group, dense, towers, variables=kind)
    model.compile(sgd(), "mse", metrics=["mae"])
    data = own_batches(group, of_ranks, is_known=is_known)
    history = model.fit(data, epochs=2, verbose=0, validation_data=data).history
    return [*history.values()], model.get_weights()
