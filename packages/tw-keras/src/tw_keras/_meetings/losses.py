"""Losses that must be weighted by tower before they are differentiated.

A tower's loss is a mean over its own rows, and gradients are averaged, weighted by
rows, as they are reduced. Some losses need a factor earlier: losses that an optimizer
scales, since means over a tower's own rows have K times one device's gradients, and
overflow sooner; losses through synchronised layers, whose gradients are added over
towers; and losses whose reduction is not a mean over rows, next to others.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import keras
import tensorflow as tf

from tw_core.internal import is_same_in_towers, may_meet, meet, weigh
from tw_keras._checks import check_losses, reductions_of
from tw_keras._keras_compat import replaced_losses
from tw_keras._meetings.step import Step
from tw_keras._update.optimizers import scales_losses

_NUMBER = tf.TensorSpec([], tf.float64)


class Losses:
    """The factors of the losses of one step."""

    def __init__(self, step: Step, optimizers: Sequence[Any]) -> None:
        """Computes the towers' parts, if one of the optimizers needs them."""
        self._step = step
        self.of_tower: Sequence[Any] = ()  # the running tower's part, or none
        self.reached: Sequence[str] = ()  # by which sums it reaches other towers
        self._weighed = set[int]()  # places of the optimizers that have used it
        self._free = set[int]()  # and of those before any sum was reached
        self._has_parted = False  # whether regularizers' losses were divided
        self._part: tuple[tf.Graph, Any] | None = None
        self._applied = dict[int, str]()  # names of optimizers
        self.are_means = dict[str, bool]()  # by name, of what a step logs
        self.results = set[int]()  # ids of metrics' results
        asks = step.trains and step.average and not step.is_whole
        asks = asks and any(map(scales_losses, optimizers))
        asks = asks or "sum" in step.rescaled
        self.factors = step.report.parts() if asks else []  # [K]; or none

    @cached_property
    def _asks_for_kinds(self) -> bool:
        """Whether ``loss_reduction`` says alone that losses are sums."""
        main: Any = self._step.copies.main
        is_plain = type(main).train_step is keras.Model.train_step
        is_known = is_plain and reductions_of(main) == {"sum"}
        return self._step.copies.adds and not (self._step.is_whole or is_known)

    def weighing(self, n: int, scale_loss: Callable[[Any], Any]) -> Callable[..., Any]:
        """Returns a ``scale_loss``, of optimizer ``n``, that weights losses first."""

        def method(loss: Any) -> Any:
            if may_meet():
                loss = self._weighed_by_tower(n, loss)
            return scale_loss(loss)

        return method

    def _weighed_by_tower(self, n: int, loss: Any) -> Any:
        """Weights a loss whose gradients reach other towers, or that is scaled."""
        if not self._step.average:
            self._check_added(loss)
            return loss
        part = self.of_tower[0] if self.of_tower else None
        if part is None and self.reached and self._step.report.weights is not None:
            part = self._own_part()
        if part is None:
            self._free.add(n)
            return loss
        if n in self._free:
            raise ValueError(
                "TowerModel: a train_step calls one optimizer's scale_loss before and "
                f"after {self._names()}, by which a loss reaches other towers; call it "
                "for the sum of the losses."
            )
        self._weighed.add(n)
        return weigh(loss, part)  # NaN of zero rows to 0

    def _check_added(self, loss: Any) -> None:
        """Refuses a loss of all rows, which every tower has, where losses are added."""
        if self.reached and is_same_in_towers(loss):
            raise ValueError(
                f"TowerModel: the loss is of the rows of all towers ({self._names()}), "
                "and every tower has it, so the sum of the towers' losses counts each "
                "row once per tower; use a loss that is a mean (leave out "
                "loss_reduction='sum'), or sum over a tower's own rows."
            )

    def _names(self) -> str:
        """Names the layers by which a loss reaches other towers."""
        return ", ".join(dict.fromkeys(self.reached))

    def _own_part(self) -> Any:
        """Returns the running tower's part, which it waits for."""
        graph = tf.compat.v1.get_default_graph()
        if self._part is None or self._part[0] is not graph:
            self._part = graph, meet(("part", 0), None, answer=_NUMBER)
        return self._part[1]

    def parted(self, aggregate: Callable[[Any], Any]) -> Callable[..., Any]:
        """Returns an ``aggregate`` for regularizers, where other losses are added.

        Every tower has the whole loss, so each multiplies it by its part.
        """

        def method(loss: Any) -> Any:
            value = aggregate(loss)
            if not may_meet():
                return value
            self._has_parted = True
            return weigh(value, self._own_part())

        return method

    def is_mean(self, value: Any, what: str) -> bool:
        """Returns whether a number is a mean over rows, in a step that adds losses.

        Of an optimizer's loss ``loss_reduction="sum"`` says so; not of what is logged.
        """
        is_scalar = isinstance(value, tf.Tensor) and value.shape.rank == 0
        if not (is_scalar and value.dtype.is_floating and self._asks_for_kinds):
            return False
        if hasattr(value, "numpy"):  # eager
            return False
        kinds = _reductions(value)
        if len(kinds) > 1 or not kinds <= {"Sum", "Mean"}:
            raise ValueError(
                f"TowerModel: with loss_reduction='sum', {what} must be a sum or a "
                "mean over rows, so that the towers' values can be combined; got one "
                f"computed by {', '.join(sorted(kinds))}. Pass one value per row to a "
                "metric, and log its result."
            )
        return kinds == {"Mean"}

    def note_logs(self, logs: Any) -> None:
        """Notes which of the numbers that a step logs are means over rows."""
        for name, value in logs.items() if isinstance(logs, dict) else ():
            if value is not None and id(value) not in self.results:
                self.are_means[name] = self.is_mean(value, f"the logged {name!r}")

    def check_parted(self) -> None:
        """Refuses regularizers if a step adds their losses itself."""
        if not (self._has_parted or self._step.is_whole):
            raise ValueError(
                "TowerModel: a loss that is summed over rows cannot be separated from "
                "the regularizers' losses, which every tower has; call "
                "self.compute_loss in your train_step, use the reduction "
                "'sum_over_batch_size', or remove the regularizers."
            )

    def rescaling(self, compiled: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a ``call`` of compiled losses that makes all means over rows.

        Refuses those without a reduction.
        """

        def method(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            if not may_meet():
                return call(y_true, y_pred, sample_weight)
            check_losses(self._step.rescaled)
            if not compiled.built:
                compiled.build(y_true, y_pred)
            with replaced_losses(compiled, self._mean_over_rows):
                return call(y_true, y_pred, sample_weight)

        return method

    def _mean_over_rows(self, n: int, loss: Any) -> Callable[..., tf.Tensor]:
        """Returns a function that computes the n-th loss as a mean over rows."""

        def mean(y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
            value = loss(y_true, y_pred, sample_weight)
            if loss.reduction not in self._step.rescaled:
                return value
            if loss.reduction == "sum":
                # Cancels the tower's part, by which its loss is multiplied later.
                return weigh(value, tf.math.reciprocal_no_nan(self.of_tower[0]))
            if sample_weight is None:  # a mean over rows already
                return value
            total = tf.reduce_sum(tf.cast(sample_weight, tf.float64))
            return weigh(value, meet(("divisor", n), total, answer=_NUMBER))

        return mean

    def divisor_factors(self, sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns [K] factors that turn losses over ``sums`` into means over rows.

        ``sums``: of the towers' sample weights, by which Keras has divided.
        """
        step, ranks = self._step, self._step.ranks
        rows = step.report.weights or [1] * len(sums)
        rows = [tf.cast(number, tf.float64) for number in rows]
        sums = [tf.cast(total, tf.float64) for total in step.of_own_rows(sums)]
        totals = tf.stack([tf.add_n(rows), tf.add_n(sums)])
        if ranks is not None and step.trains:
            [totals] = ranks.exchanges.sum_layer("divisors of losses", [totals])
        elif ranks is not None and ranks.shares_data:
            raise ValueError(
                "TowerModel: a loss with reduction='mean_with_sample_weight' divides "
                "by a sum over all ranks, which is not known when they validate on "
                "shared data; use 'sum_over_batch_size', or data='own'."
            )
        per_row = tf.math.divide_no_nan(totals[0], totals[1])
        return [
            tf.math.divide_no_nan(total, of_tower) * per_row
            for total, of_tower in zip(sums, rows, strict=True)
        ]

    def have_weighed(self, n: int, optimizer: Any) -> bool:
        """Returns whether an optimizer's losses were weighted, so gradients are not."""
        self._applied[n] = optimizer.name
        if len(self._applied) > 1 and self._asks_for_kinds:
            raise ValueError(
                "TowerModel: loss_reduction='sum' holds for all optimizers, but it is "
                "unknown whether the losses of each of "
                f"{', '.join(self._applied.values())} are sums over rows; "
                "differentiate means over rows, and leave out loss_reduction."
            )
        if n not in self._weighed | self._free:
            self._check_unweighed(optimizer)
        return n in self._weighed

    def _check_unweighed(self, optimizer: Any) -> None:
        if self._weighed and scales_losses(optimizer):
            raise ValueError(
                "TowerModel: a train_step scales a loss with one optimizer, but "
                f"applies gradients with another, {optimizer.name}, without its "
                "scale_loss, so it is unknown whether these are weighted by rows; "
                f"differentiate {self._path_of(optimizer)}.scale_loss(loss), of the "
                "optimizer that applies."
            )
        if self._step.report.weights is not None and self.reached:
            raise ValueError(
                f"TowerModel: a loss reaches other towers by {self._names()}, so the "
                "towers' losses must be weighted by their rows, each by the optimizer "
                "that applies its gradients; have your train_step differentiate "
                f"{self._path_of(optimizer)}.scale_loss(loss)."
            )

    def _path_of(self, optimizer: Any) -> str:
        """Returns how a ``train_step`` refers to an optimizer."""
        attributes = vars(self._step.copies.main).items()
        found = [name for name, value in attributes if value is optimizer]
        return f"self.{found[0]}" if found else f"the optimizer {optimizer.name}"


_LINEAR = {"AddV2", "Add", "AddN", "Sub", "Neg", "Mul", "Identity", "Cast"}
_OVER_AXES = {"Sum", "Mean"}
_QUOTIENTS = {"RealDiv", "DivNoNan"}


def _reductions(value: tf.Tensor) -> set[str]:
    """Returns which operations reduce the rows in the terms of which a number is a sum.

    ``Mean`` also for a term that is the same in all towers.
    """
    op, constant = value.op, tf.get_static_value(value)
    if constant is not None and not constant.any():
        return set()  # as Python's sum begins
    if is_same_in_towers(value):
        return {"Mean"}
    if op.type == "MulNoNan":  # towers' shares of a regularizer's loss
        return {"Sum"}
    if op.type in _OVER_AXES:
        inner = op.inputs[0].op
        return _reductions(inner.outputs[0]) if _reduces_rows(inner) else {op.type}
    if op.type in _QUOTIENTS and _counts(op.inputs[1]):
        return {"Mean"} if _reductions(op.inputs[0]) == {"Sum"} else {op.type}
    if op.type not in _LINEAR:
        return {op.type}
    inputs = list(op.inputs)
    if op.type == "Mul":
        inputs = [factor for factor in inputs if not is_same_in_towers(factor)]
        if len(inputs) > 1:
            return {op.type}
    return set().union(*map(_reductions, inputs))


def _counts(divisor: tf.Tensor) -> bool:
    """Returns whether a divisor is a number of rows, or of elements, as Keras's is."""
    op = divisor.op
    while op.type in ("Cast", "Identity"):
        op = op.inputs[0].op
    is_length = op.type == "StridedSlice" and op.inputs[0].op.type == "Shape"
    return op.type in ("Prod", "Size") or is_length


def _reduces_rows(op: tf.Operation) -> bool:
    if op.type not in _OVER_AXES:
        return False
    axes, rank = tf.get_static_value(op.inputs[1]), op.inputs[0].shape.rank
    return bool(axes is not None and rank and (axes % rank == 0).any())
