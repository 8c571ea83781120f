"""Options of ``TowerModel.fit`` that may meet, for ``test_pairs``: a program for all.

An option changes a plan, whose result is what towers train, or plain Keras on one
device with the same optimizer, losses and data. Some options change no number; these
leave a sign, so that one that is ignored is seen.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import keras
import numpy as np
import tensorflow as tf
from harness.casts import float64

from tw_core.internal import compiles_with_xla, tf_variable
from tw_core.testing import CPUS
from tw_keras import TowerModel
from tw_reduce import sum_on_device
from tw_reduce.compression import error_feedback

RANDOM = np.random.default_rng(0)
STEPS, ROWS, EPOCHS = 4, 10, 2  # 10 rows, which no towers here divide evenly
OWN_ROWS = (7, 3)  # of each rank, where they have their own; the last step has no 3
X = RANDOM.normal(size=(STEPS * ROWS, 3))
IDS = RANDOM.integers(0, 5, size=(STEPS * ROWS, 2))  # rows 5 and 6 are never used
Y = RANDOM.normal(size=(STEPS * ROWS, 2))
ZERO = 18  # a row of the second batch, of the last tower, whose gradient may be NaN
TRIES = 0.5 + RANDOM.random(STEPS * ROWS)  # weights of rows
HAPPENED = Counter[str]()  # in a fit: the signs of options
optimizers = keras.optimizers


@dataclass
class Plan:
    """What is trained, by towers and by plain Keras."""

    model: dict[str, Any] = field(default_factory=dict)  # of TowerModel
    compile: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Any] = field(default_factory=list)
    wraps: list[Callable[[Any], Any]] = field(default_factory=list)
    momentum: float = 0.9
    weighs: bool = False
    remembers: bool = False
    has_own_data: bool = False
    has_nan: bool = False

    def made_optimizer(self, *, for_towers: bool) -> Any:
        kind = Remembering if self.remembers and not for_towers else optimizers.SGD
        own = kind(0.1, momentum=self.momentum, **self.optimizer)
        for wrap in self.wraps:
            own = wrap(own)
        return own

    def batches(self, group: Any) -> tuple[np.ndarray, int]:
        """Returns the places of a process's rows, and how many of them a batch has."""
        rows, (first, second) = np.arange(STEPS * ROWS), OWN_ROWS
        if not self.has_own_data:
            return rows, ROWS
        if group is None or group.size == 1:
            return rows[:-second], ROWS
        of_steps = rows.reshape([STEPS, ROWS])
        if group.rank == 0:
            return of_steps[:, :first].ravel(), first
        return of_steps[:-1, first:].ravel(), second


class Remembering(optimizers.SGD):
    """Error feedback by ``half`` on one device, where Keras would clip gradients."""

    def build(self, variables: Sequence[Any]) -> None:
        super().build(variables)
        if not hasattr(self, "errors"):
            self.errors = self.add_optimizer_variables(variables, "error")

    def _backend_apply_gradients(self, grads: Any, variables: Any) -> None:
        self._used = variables  # without those that have no gradient
        super()._backend_apply_gradients(grads, variables)

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        return super()._clip_gradients(list(map(self._sent, grads, self._used)))

    def _sent(self, grad: Any, variable: Any) -> Any:
        if isinstance(grad, tf.IndexedSlices) or grad.shape.rank < 2:
            return grad
        error = self.errors[self._get_variable_index(variable)]
        sent = (grad + error) / 2
        error.assign(sent)
        return sent


def half(tensor: tf.Tensor) -> Any:
    """Compresses to half of a tensor, so that the memory is as large as what is sent.

    The halves of all towers add up to half of the sum, so that the number of towers
    makes no difference.
    """
    return [tensor / 2], tf.identity


@contextmanager
def noting_exchanges(group: Any) -> Iterator[None]:
    """Notes when ranks add gradients."""
    with ExitStack() as stack:
        for name in () if group is None else ("sum", "reduce_scatter"):
            method = _noting(getattr(group, name))
            stack.enter_context(patch.object(group, name, method))
        yield


def _noting(exchange: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        names = named.get("names") or [named.get("name", "")]
        HAPPENED["exchange"] += any("update" in own for own in names)
        HAPPENED["wire"] += named.get("wire_dtype") == "bfloat16"
        return exchange(*arguments, **named)

    return call


def sum_first(grads: Any) -> Any:
    HAPPENED["own reducer"] += 1
    return sum_on_device(grads, device="/cpu:0")


def tanh(rows: Any) -> Any:
    HAPPENED["eager"] += tf.executing_eagerly()
    HAPPENED["XLA"] += compiles_with_xla()
    return tf.tanh(rows)


def root(rows: Any) -> Any:
    """Has a gradient of NaN where the argument is zero."""
    return tf.sqrt(tf.abs(rows))


def _accumulation(plan: Plan) -> None:
    plan.optimizer["gradient_accumulation_steps"] = 2


def _memory(plan: Plan) -> None:
    plan.model["reducer"] = error_feedback(half, min_elements=1)
    plan.remembers = True


def _clipping(plan: Plan) -> None:
    plan.optimizer["global_clipnorm"] = 0.3


def _decay(plan: Plan) -> None:
    plan.optimizer["weight_decay"] = 0.1


def _average(plan: Plan) -> None:
    plan.optimizer |= {"use_ema": True, "ema_momentum": 0.7}
    plan.optimizer["ema_overwrite_frequency"] = 3


def _loss_scale(plan: Plan) -> None:
    """All skip the step in which one has NaN."""
    plan.has_nan = True
    scale = partial(optimizers.LossScaleOptimizer, initial_scale=8.0)
    plan.wraps.append(partial(scale, dynamic_growth_steps=3))


def _local_steps(plan: Plan) -> None:
    """A mean of steps without momentum is the step by the mean."""
    plan.model["local_steps"] = 1
    plan.momentum = 0.0


def _own_data(plan: Plan) -> None:
    """A rank without a batch takes part in the others' last step."""
    plan.has_own_data = True


def _steps_per_execution(plan: Plan) -> None:
    plan.compile["steps_per_execution"] = 2
    # Of Keras's own class: for a user's, gradients are reduced in every step.
    counter = keras.callbacks.Callback()
    counter.on_train_batch_end = lambda *_, **__: HAPPENED.update(["step"])
    plan.callbacks.append(counter)


def _weights(plan: Plan) -> None:
    plan.weighs = True


def _in(what: str, **values: Any) -> Callable[[Plan], None]:
    return lambda plan: getattr(plan, what).update(values)


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
    "own data": _own_data,
    "eager": _in("compile", run_eagerly=True),
    "XLA": _in("compile", jit_compile=True),
    "steps per execution": _steps_per_execution,
    "own reducer": _in("model", reducer=sum_first),
    "weights": _weights,
    "wire": _in("model", wire_dtype="bfloat16"),
}


def _is_in_shards(model: Any) -> bool:
    """Whether some of the optimizer's state is on another tower, or another rank."""
    slots = [tf_variable(own) for own in _inner(model.optimizer).momentums]
    elements = sum(own.shape.num_elements() for own in slots)
    is_on_one = len({own.device for own in slots}) == 1
    # Local steps are without momentum, and a lone tower has all state.
    is_known = bool(slots) and len(model.towers) > 1
    is_apart = not is_on_one or elements < model.towers[0].count_params()
    return is_apart or not is_known


SIGNS: dict[str, Callable[[Any], bool]] = {
    "shards": _is_in_shards,
    "parameter server": lambda model: len(set(map(id, model.towers))) == 1,
    "local steps": lambda _: HAPPENED["exchange"] == 0,
    "eager": lambda _: HAPPENED["eager"] > 0,
    "XLA": lambda _: HAPPENED["XLA"] + HAPPENED["eager"] > 0,
    "steps per execution": lambda _: 0 < HAPPENED["step"] <= EPOCHS * STEPS / 2,
    "own reducer": lambda _: HAPPENED["own reducer"] > 0,
    "wire": lambda _: HAPPENED["wire"] > 0,
}


def made() -> Any:
    """Has a table, a variable whose gradient may be NaN, and a layer without one."""
    rows, ids = keras.Input([3]), keras.Input([2], dtype="int32")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(7, 3)(ids))
    rooted = keras.layers.Dense(1, root, use_bias=False)(rows)
    joined = keras.layers.Concatenate()([rows, embedded, rooted])
    hidden = keras.layers.Dense(8, tanh)(joined)
    model = keras.Model([rows, ids], keras.layers.Dense(2)(hidden))
    model.unused = keras.layers.Dense(2)
    model.unused.build([None, 8])
    values = np.random.default_rng(1)
    model.set_weights([values.normal(size=own.shape) for own in model.weights])
    return model


def planned(names: Iterable[str]) -> Plan:
    plan = Plan()
    for name in names:
        OPTIONS[name](plan)
    return plan


def trained(group: Any, names: Iterable[str], num_towers: int) -> dict[str, Any] | str:
    """Returns numbers and missing signs; of plain Keras where there are no towers.

    Or the message of the error by which the options are refused.
    """
    plan = planned(names)
    with float64(), noting_exchanges(group):
        try:
            return _trained(group, plan, names, num_towers)
        except (TypeError, ValueError) as error:
            if num_towers:
                return str(error)
            raise


def _trained(
    group: Any, plan: Plan, names: Iterable[str], num_towers: int
) -> dict[str, Any]:
    model = _towers(group, plan, num_towers) if num_towers else made()
    # Divides by the sum of the rows' weights.
    kind = "mean_with_sample_weight" if plan.weighs else "sum_over_batch_size"
    model.compile(
        plan.made_optimizer(for_towers=bool(num_towers)),
        keras.losses.MeanSquaredError(kind),
        metrics=["mae"],
        **{"jit_compile": False, **plan.compile},
    )
    rows, count = plan.batches(group)
    x = np.where((np.arange(len(X)) == ZERO)[:, None] & plan.has_nan, 0.0, X)
    data = [(x[rows], IDS[rows]), Y[rows], *([TRIES[rows]] if plan.weighs else [])]
    batches = tf.data.Dataset.from_tensor_slices(tuple(data)).batch(count)
    HAPPENED.clear()
    fits = partial(model.fit, batches, epochs=EPOCHS, verbose=0)
    history = fits(callbacks=plan.callbacks).history
    copies = model.towers if num_towers else [model]
    return {
        "weights": [own.get_weights() for own in copies],  # by tower
        "history": [*history.values()],
        "optimizer": _counts(model.optimizer),
        "unseen": [
            name
            for name in names
            if num_towers and name in SIGNS and not SIGNS[name](model)
        ],
    }


def _towers(group: Any, plan: Plan, num_towers: int) -> TowerModel:
    options = dict(plan.model)
    if group is not None:
        options |= {"group": group, "data": "own" if plan.has_own_data else "shared"}
    if plan.weighs:
        options["weights"] = lambda x, y, w: tf.reduce_sum(w)
    return TowerModel(made, CPUS[:num_towers], **options)


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _counts(optimizer: Any) -> list[float]:
    """Returns the updates, and the loss scale if there is one."""
    scale = getattr(optimizer, "dynamic_scale", 0)
    return [float(_inner(optimizer).iterations), float(scale)]
