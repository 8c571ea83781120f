"""Options of ``TowerModel.fit`` that may meet, for ``test_pairs``: a program for all.

An option changes a plan, whose result is what towers train, or plain Keras on one
device with the same optimizer, losses and data.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from harness.casts import float64

from tw_core.testing import CPUS
from tw_keras import TowerModel
from tw_reduce import sum_on_device
from tw_reduce.compression import error_feedback

RANDOM = np.random.default_rng(0)
STEPS, ROWS = 4, 10  # of a batch, which four towers do not divide evenly
X = RANDOM.normal(size=(STEPS * ROWS, 3))
IDS = RANDOM.integers(0, 5, size=(STEPS * ROWS, 2))  # rows 5 and 6 are never used
Y = RANDOM.normal(size=(STEPS * ROWS, 2))
TRIES = 0.5 + RANDOM.random(STEPS * ROWS)  # weights of rows
optimizers = keras.optimizers


@dataclass
class Plan:
    """What is trained, by towers and by plain Keras."""

    model: dict[str, Any] = field(default_factory=dict)  # of TowerModel
    compile: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    wraps: list[Callable[[Any], Any]] = field(default_factory=list)
    momentum: float = 0.9
    weighs: bool = False

    def made_optimizer(self) -> Any:
        own = optimizers.SGD(0.1, momentum=self.momentum, **self.optimizer)
        for wrap in self.wraps:
            own = wrap(own)
        return own


def _accumulation(plan: Plan) -> None:
    plan.optimizer["gradient_accumulation_steps"] = 2


def _clipping(plan: Plan) -> None:
    plan.optimizer["global_clipnorm"] = 0.3


def _decay(plan: Plan) -> None:
    plan.optimizer["weight_decay"] = 0.1


def _average(plan: Plan) -> None:
    plan.optimizer |= {"use_ema": True, "ema_momentum": 0.7}
    plan.optimizer["ema_overwrite_frequency"] = 3


def _loss_scale(plan: Plan) -> None:
    scale = partial(optimizers.LossScaleOptimizer, initial_scale=8.0)
    plan.wraps.append(partial(scale, dynamic_growth_steps=3))


def _local_steps(plan: Plan) -> None:
    """A mean of steps without momentum is the step by the mean."""
    plan.model["local_steps"] = 1
    plan.momentum = 0.0


def _weights(plan: Plan) -> None:
    plan.weighs = True


def _in(what: str, **values: Any) -> Callable[[Plan], None]:
    return lambda plan: getattr(plan, what).update(values)


def _memory(plan: Plan) -> None:
    plan.model["reducer"] = error_feedback(sends_all, min_elements=1)


def sends_all(tensor: tf.Tensor) -> Any:
    """Compresses to the tensor itself, so that nothing is rounded."""
    return [tensor], tf.identity


def sum_first(grads: Any) -> Any:
    return sum_on_device(grads, device="/cpu:0")


OPTIONS: dict[str, Callable[[Plan], None]] = {
    "accumulation": _accumulation,
    "memory": _memory,
    "loss scale": _loss_scale,
    "clipping": _clipping,
    "weight decay": _decay,
    "average of weights": _average,
    "shards": _in("model", variables="sharded"),
    "parameter server": _in("model", variables="parameter_server"),
    "local steps": _local_steps,
    "eager": _in("compile", run_eagerly=True),
    "XLA": _in("compile", jit_compile=True),
    "steps per execution": _in("compile", steps_per_execution=2),
    "own reducer": _in("model", reducer=sum_first),
    "weights": _weights,
}
# Values of one option.
APART = ({"memory", "own reducer"}, {"shards", "parameter server"})


def are_apart(names: Iterable[str]) -> bool:
    return any(len(apart.intersection(names)) > 1 for apart in APART)


def made() -> Any:
    rows, ids = keras.Input([3]), keras.Input([2], dtype="int32")
    embedded = keras.layers.Embedding(7, 3)(ids)
    joined = keras.layers.Concatenate()([rows, keras.layers.Flatten()(embedded)])
    hidden = keras.layers.Dense(8, "tanh")(joined)
    model = keras.Model([rows, ids], keras.layers.Dense(2)(hidden))
    values = np.random.default_rng(1)
    model.set_weights([values.normal(size=own.shape) for own in model.weights])
    return model


def planned(names: Iterable[str]) -> Plan:
    plan = Plan()
    for name in names:
        OPTIONS[name](plan)
    return plan


def trained(group: Any, names: Iterable[str], num_towers: int) -> Any:
    """Returns the weights, by tower, and the history; 0 towers: of plain Keras.

    Or the message of the error by which the options are refused.
    """
    plan = planned(names)
    with float64():
        try:
            return _trained(group, plan, num_towers)
        except (TypeError, ValueError) as error:
            if num_towers:
                return str(error)
            raise


def _trained(group: Any, plan: Plan, num_towers: int) -> Any:
    if num_towers:
        shared = {} if group is None else {"group": group, "data": "shared"}
        if plan.weighs:
            shared["weights"] = lambda x, y, w: tf.reduce_sum(w)
        model = TowerModel(made, CPUS[:num_towers], **shared, **plan.model)
    else:
        model = made()
    # Divides by the sum of the rows' weights.
    kind = "mean_with_sample_weight" if plan.weighs else "sum_over_batch_size"
    loss = keras.losses.MeanSquaredError(kind)
    compiles = {"jit_compile": False, **plan.compile}
    model.compile(plan.made_optimizer(), loss, metrics=["mae"], **compiles)
    data = [X, IDS], Y, *([TRIES] if plan.weighs else [])
    sets = tf.data.Dataset.from_tensor_slices((tuple(data[0]), *data[1:])).batch(ROWS)
    history = model.fit(sets, epochs=2, verbose=0).history
    copies = model.towers if num_towers else [model]
    return [own.get_weights() for own in copies], list(history.values())
