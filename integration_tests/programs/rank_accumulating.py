"""What ranks do in ``test_accumulating_over_ranks``: tower optimizers, in ``fit``.

One device has all ranks' rows of a batch in one.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tw_ampopt
from programs.rank_batches import own_batches
from programs.rank_groups import Counted
from programs.rank_local import linear
from programs.rank_training import X, dense, made, over_towers
from tw_core.testing import CPUS
from tw_keras import LocalSteps, TowerModel
from tw_reduce import compression

UNEVEN = [[4, 6, 1, 3, 5], [3]]  # rows; an epoch ends within a group of three
BAD = 8  # a row of the second batch of rank 0
TOP = compression.error_feedback(compression.top_k(count=2), min_elements=1)
SCALED = tw_ampopt.DynamicLossScale(init=10, growth_interval=1)


def mean_of_rows(tensor: Any) -> Any:
    """Compresses a matrix to a number for each row, in dense tensors."""
    sent = tf.reduce_mean(tensor, axis=-1, keepdims=True)
    return [sent], lambda total: total + tf.zeros_like(tensor)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"rows": UNEVEN},
    "scaled": {"rows": UNEVEN, "optimizer": {"loss_scale": SCALED}, "is_known": False},
    "clipped, compiled": {
        "rows": UNEVEN,
        "optimizer": {"clip_by_global_norm": 0.1},
        "compile": {"jit_compile": True},
    },
    "three ranks": {"rows": [[4, 6, 1, 3], [], [2, 2]]},
    "no rows": {"rows": [[0, 3, 2, 0], [4, 0, 0, 2]]},
    "shared variables": {"rows": UNEVEN, "variables": "parameter_server"},
    "skipped": {"rows": UNEVEN, "is_bad": True, "optimizer": {"loss_scale": SCALED}},
    "dropped": {
        "rows": UNEVEN,
        "is_bad": True,
        "optimizer": {"on_nonfinite": "drop_micro_batch"},
    },
    "several steps in one call": {
        "rows": [[4, 6, 1, 3], [3, 2]],
        "compile": {"steps_per_execution": 2},
    },
    "eagerly": {"rows": UNEVEN, "compile": {"run_eagerly": True}},
    "added losses": {
        "rows": UNEVEN,
        "compile": {"loss": keras.losses.MeanSquaredError("sum")},
        "model": {"loss_reduction": "sum"},
    },
    # Each rank, or tower of one process, compresses the share of its own rows.
    "memory": {
        "rows": [[4, 4, 4, 4], [4, 4, 4, 4]],
        "optimizer": {
            "reducer": compression.error_feedback(mean_of_rows, min_elements=1)
        },
        "is_each": True,
    },
    # No epoch ends within a group, where each rank takes the mean of all sums.
    "memory, rows": {
        "rows": [[4, 4, 4], [4, 4, 4]],
        "optimizer": {"reducer": TOP},
        "is_each": True,
    },
}


def train(group: Any, name: str, towers: int) -> Any:
    """Returns history, weights, counts, and the mean of what is accumulated at last."""
    case = CASES[name]
    options = {
        "variables": case.get("variables", "replicated"),
        **case.get("model", {}),
    }
    if group is None:
        make = lambda: made(None, dense, 1)  # noqa: E731
        model = TowerModel(make, CPUS[:towers], **options)
    else:
        model = made(group, dense, towers, **options)
    model.build([None, 4])
    optimizer = over_towers(model, 3, **case.get("optimizer", {}))
    compiles = {"loss": "mse", "jit_compile": False, **case.get("compile", {})}
    if group is None:
        compiles["steps_per_execution"] = 1
    model.compile(optimizer, **compiles)
    is_known = case.get("is_known", True)
    data = own_batches(group, case["rows"], is_known=is_known or group is None)
    if "is_bad" in case:
        data = data.map(spoil)
    history = model.fit(data, epochs=2, verbose=0).history
    counts = {key: float(own) for key, own in optimizer.statistics().items()}
    count, own = optimizer.progress[0], optimizer._updater.accumulator
    if own.summed is not None:
        count = int(own.summed)
    means = [
        sum(one.numpy() for one in of_towers) / own.weight.divisor(count).numpy()
        for of_towers in zip(*own.sums, strict=True)
    ]
    return [*history.values()], model.get_weights(), counts, optimizer.progress, means


def resume(group: Any, towers: int) -> list[Any]:
    """Trains after an update on rank 0 alone; returns weights, scale and slots."""
    if group is None:
        model = TowerModel(lambda: made(None, dense, 1), CPUS[:towers])
    else:
        model = made(group, dense, towers)
    model.build([None, 4])
    optimizer = over_towers(model, None, loss_scale=SCALED)
    if group is None or group.rank == 0:
        grads = [
            [tf.ones_like(v) for v in own.trainable_variables] for own in model.towers
        ]
        optimizer.apply(grads)
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(own_batches(group, [[4, 4], [4, 4]]), epochs=1, verbose=0)
    return [v.numpy() for v in (*model.trainable_variables, *optimizer.variables())]


def spoil(x: Any, y: Any) -> Any:
    is_bad = tf.reduce_all(tf.equal(x, X[BAD]), axis=1, keepdims=True)
    return tf.where(is_bad, np.inf, x), y


class Notes(keras.callbacks.Callback):
    """Keeps what was exchanged in each epoch."""

    def __init__(self, group: Counted) -> None:
        super().__init__()
        self._seen, self.found = group.seen, list[list[int]]()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._seen.clear()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.found.append([*self._seen])


def counted(
    group: Any, steps: int | None, ours: Any, looks: bool, options: Any
) -> list[list[int]]:
    """Returns the bytes of each exchange in the eight steps of an epoch.

    ``ours`` are options of a tower optimizer, or None for one of Keras.
    """
    group = Counted(group)
    if "local_steps" in options:
        options = {"local_steps": LocalSteps(*options["local_steps"])}
    model = made(group, linear, 2, **options)
    if ours is None:
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps)
    else:
        model.build([None, 4])
        optimizer = over_towers(model, steps, **ours)
    model.compile(optimizer, "mse")
    notes = Notes(group)
    looking = [keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: None)]
    own = [notes, *(looking if looks and group.rank == 1 else [])]
    model.fit(X[:32], X[:32, :1], 4, 2, verbose=0, callbacks=own)
    return notes.found


def saved(group: Any, folder: str) -> Any:
    """Ends an epoch within a group, saves on rank 0, and goes on from that."""
    model = made(group, dense, 2)
    model.build([None, 4])
    optimizer = over_towers(model, 3)
    model.compile(optimizer, "mse")
    data = own_batches(group, UNEVEN)
    checkpoint = tf.train.Checkpoint(model=model.towers[0], optimizer=optimizer)
    model.fit(data, epochs=1, verbose=0)
    if group.rank == 0:
        checkpoint.write(f"{folder}/saved")
    model.fit(data, epochs=1, verbose=0)
    ends = [model.get_weights()]
    checkpoint.read(f"{folder}/saved")
    model.copy_to_replicas()
    model.fit(data, epochs=1, verbose=0)
    return [*ends, model.get_weights()]


def refused(group: Any, differs: str) -> None:
    """Begins ``fit`` with what differs between ranks."""
    model = made(group, linear, 1)
    model.build([None, 4])
    steps = 3 + group.rank if differs == "steps" else 3
    optimizer = over_towers(model, steps)
    if group.rank and differs == "progress":
        optimizer.apply([[tf.zeros_like(own) for own in model.trainable_variables]])
    model.compile(optimizer, "mse")
    model.fit(X[:32], X[:32, :1], 4, 2, verbose=0)
