"""Where the towers' steps synchronise: optimizers apply, and metrics are updated.

While a step is traced, and only then, the ``apply`` of tower 0's optimizers and the
``update_state`` and ``result`` of its metrics are replaced. The metrics are updated
once, with the arguments of all towers joined, and every tower gets their results: so
any metric has the same value as on one device. These optimizers also make all updates:
the other towers have only their state. In an eager step, which runs on a whole batch,
only calls that involve other towers or ranks are replaced.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from tw_builders.internal import owned
from tw_core.internal import (
    is_same_in_towers,
    join_rows,
    may_meet,
    meet,
    split_rows,
    tf_variable,
)
from tw_keras._checks import check_records, metrics_of
from tw_keras._keras_compat import ADDED_LOSSES, compiled_loss_of, replaced
from tw_keras._meetings import metrics
from tw_keras._meetings.losses import Losses
from tw_keras._meetings.step import Step
from tw_keras._update.gradients import TowerGradients


class Meetings:
    """The calls that all towers make together, and how they are combined."""

    def __init__(self, step: Step) -> None:
        """Finds the optimizers and metrics of tower 0."""
        self._step, self._copies = step, step.copies
        self._graph = tf.compat.v1.get_default_graph()  # of the step
        self._optimizers = step.copies.optimizers
        self._metrics = metrics_of(step.copies.main)
        self.losses = Losses(step, self._optimizers)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Makes towers synchronise in calls of optimizers and metrics, while open."""
        known = set[tuple[int, str]]()
        with ExitStack() as stack:
            for owner, method, new in self._replacements():
                if (id(owner), method) not in known:  # a metric may be held twice
                    known.add((id(owner), method))
                    stack.enter_context(replaced(owner, method, new))
            yield

    def _replacements(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Yields objects, names of methods, and functions that wrap these methods."""
        step, losses, main = self._step, self.losses, self._copies.main
        for n, optimizer in enumerate(self._optimizers):
            if step.trains and not step.is_whole:
                yield optimizer, "scale_loss", partial(losses.weighing, n)
            yield optimizer, "apply", partial(_applying, n, self._homes)
        for n, metric in enumerate(self._metrics):
            if not step.is_one_device:
                what = f"the number that a step passes to {metric.name!r}"
                is_mean = partial(losses.is_mean, what=what)
                yield metric, "update_state", partial(metrics.updating, n, is_mean)
            if not step.is_alone:
                yield metric, "result", partial(metrics.showing, n, losses)
        compiled = compiled_loss_of(main)
        if step.rescaled and compiled:
            yield compiled, "call", partial(losses.rescaling, compiled)
        if not (step.average or step.is_whole):
            yield main, ADDED_LOSSES, losses.parted

    def combine(self, place: tuple[str, int], values: list[Any]) -> Sequence[Any]:
        """Makes the call that all towers have reached, once; returns [K] answers."""
        kind, n = place
        if kind == "divisor":
            return self.losses.divisor_factors(values)
        if kind == "part":
            return self._step.report.parts()
        if kind == "result":
            return [metrics.as_tensors(self._metrics[n].result())] * len(values)
        if kind == "optimizer":
            self._update(n, values)
        else:
            metrics.update(self._step, self._metrics[n], values)
        return [None] * len(values)

    def _homes(self, n: int, call: tuple[Any, ...]) -> dict[int, str]:
        """Maps gradients' ids to the devices that apply them."""
        if self._copies.variables == "replicated" or self._copies.setting.shards:
            return {}
        grads, variables, _ = call
        owners = owned(self._copies.models.counterparts(variables), self._optimizers[n])
        pairs = zip(grads, owners, strict=True)
        return {id(g): tf_variable(v).device for parts, v in pairs for g in parts}

    def _update(self, n: int, calls: Sequence[Any]) -> None:
        """Makes the update by an optimizer, for all towers' calls of ``apply``."""
        step, copies, optimizer = self._step, self._copies, self._optimizers[n]
        grads, variables, same_rows = zip(*calls, strict=True)
        gradients = TowerGradients(list(map(_joined, grads)), variables, same_rows[0])
        if step.ranks is not None:
            self._check_whole_step()
        if copies.memory or (step.ranks is not None and step.ranks.exchanges.manner):
            check_records(gradients.records)
        is_weighed = self.losses.have_weighed(n, optimizer)
        row = copies.row(n, optimizer)
        is_late = row.may_divide_sums(gradients)
        factors, of_sums = self._factors(is_weighed, is_late=is_late)
        counts = step.average and getattr(optimizer, "accumulates", False)
        row(
            *(gradients, factors),
            of_sums=of_sums,
            averages=step.average and not is_weighed and factors is None,
            weight=step.report.weight if counts else None,
        )

    def _factors(
        self, is_weighed: bool, *, is_late: bool
    ) -> tuple[Sequence[Any] | None, tf.Tensor | None]:
        """Returns [K] factors of gradients, and one of sums, that make one device's."""
        step = self._step
        if is_weighed:  # Losses of weight 0 may have gradients of NaN.
            weights = step.report.weights
            return weights and [tf.cast(own > 0, tf.float64) for own in weights], None
        if step.average:
            return step.report.shares(is_late=is_late)
        if step.lent is None:
            return None, None
        rows = len(step.report.rows) - step.lent
        given = [tf.cast(k < rows, tf.float64) for k in range(len(step.report.rows))]
        return given, None

    def _check_whole_step(self) -> None:
        """Refuses an update in a branch or a function, if ranks exchange."""
        if self._graph is not tf.compat.v1.get_default_graph():
            raise ValueError(
                "TowerModel: with a group an optimizer cannot apply in a tf.cond: one "
                "rank does not know the branch of another; apply in every step, or use "
                "the optimizer's gradient_accumulation_steps. With run_eagerly it "
                "cannot apply in a tf.function either."
            )


def _applying(
    n: int,
    homes: Callable[[int, tuple[Any, ...]], dict[int, str]],
    original: Callable[..., Any],
) -> Callable[..., Any]:
    def method(*arguments: Any, **named: Any) -> Any:
        if not may_meet():
            return original(*arguments, **named)
        call = _call_of_apply(*arguments, **named)
        return meet(("optimizer", n), call, waits=True, together=homes(n, call))

    return method


def _call_of_apply(grads: Any, trainable_variables: Any = None) -> tuple[Any, ...]:
    if trainable_variables is None:
        raise ValueError(
            "TowerModel: optimizer.apply needs the tower's variables, as in "
            "optimizer.apply(gradients, self.trainable_variables)."
        )
    grads = list(grads)
    same = [
        n
        for n, grad in enumerate(grads)
        if isinstance(grad, tf.IndexedSlices) and is_same_in_towers(grad.indices)
    ]
    parts = [
        split_rows(grad) if isinstance(grad, tf.IndexedSlices) else [grad]
        for grad in grads
    ]
    return parts, list(trainable_variables), same


def _joined(grads: Sequence[Sequence[Any]]) -> list[Any]:
    """Joins the parts that ``_call_of_apply`` split for use outside of a tower."""
    joined = []
    for first, *more in grads:
        if more:
            with tf.device(first.values.device):
                first = join_rows([first, *more])
        joined.append(first)
    return joined
