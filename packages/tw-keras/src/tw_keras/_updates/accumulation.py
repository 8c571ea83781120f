"""Accumulation by Keras's optimizers: towers add locally, and reduce once per update.

With ``gradient_accumulation_steps`` an optimizer applies the mean of several batches'
gradients. Each tower adds its part to local sums. When an update is due, these are
reduced, once, and passed to the optimizer; in all other steps it receives zeros, so
that it counts and averages as usual. The local sums move to its own accumulators, which
are saved, before anything can read those.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tw_core import Tower
from tw_core.internal import tf_variable, weigh
from tw_keras import _batches

Sums = list[list[Any]]  # [K][N]
_NARROW = ("float16", "bfloat16")


def accumulates(optimizer: Any) -> bool:
    """Returns whether an optimizer accumulates as Keras's base class does."""
    inner, base = inner_of(optimizer), keras.optimizers.Optimizer
    if not getattr(inner, "gradient_accumulation_steps", None):
        return False
    scaling = keras.optimizers.LossScaleOptimizer
    names = ("apply", "_backend_apply_gradients")
    return all(getattr(type(inner), n) is getattr(base, n) for n in names) and (
        inner is optimizer or type(optimizer).apply is scaling.apply
    )


@dataclass(frozen=True)
class Told:
    """A step's scalars over all towers and ranks."""

    divisor: Any  # of the gradients' sum
    has_batch: Any = True  # on any rank
    is_finite: Any = True  # as a ``LossScaleOptimizer`` checks


class Accumulation:
    """The sums of all towers, for each optimizer that accumulates."""

    def __init__(self, towers: Sequence[Tower]) -> None:
        self._towers = towers
        self._made: dict[int, tuple[Any, Sums]] = {}
        with tf.init_scope(), tf.device("/cpu:0"):
            # Whether all steps reduce, for callbacks that read optimizers in between.
            self.at_once = tf.Variable(True, trainable=False)

    def forget(self) -> None:
        """Frees the sums of older optimizers."""
        self._made.clear()

    def collect(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        parts: Sequence[Sequence[tf.Tensor]],
        told: Told,
        reduce: Callable[[Sums], Sequence[Sequence[Any]]],
    ) -> Sums:
        """Accumulates [K][M] ``parts``; returns [K][M] gradients, mostly zeros.

        ``variables`` are tower 0's, of a built optimizer. ``reduce`` returns [K][M]
        sums, None where a tower needs none; that gradient is then meaningless.
        """
        sums, inner = self._sums(optimizer), inner_of(optimizer)
        places = [inner._get_variable_index(own) for own in variables]
        held = [[own[place] for place in places] for own in sums[: len(parts)]]
        counts = tf.logical_and(told.has_batch, told.is_finite)
        with _batches.after(list(parts)):
            is_update = is_update_due(inner)
            is_due = tf.logical_and(counts, tf.logical_or(is_update, self.at_once))
            scale = scale_of(optimizer)
            divisor = tf.cast(told.divisor, tf.float64) * scale
            factor = tf.math.divide_no_nan(tf.ones([], tf.float64), divisor)
        for own, added, tower in zip(held, parts, self._towers, strict=False):
            with tf.device(tower.device):
                for total, part in zip(own, added, strict=True):
                    more = weigh(part, factor)
                    total.assign_add(tf.where(counts, more, tf.zeros_like(more)))

        def reduced() -> tf.Tensor:
            totals = reduce([list(map(_read, own)) for own in held])
            for own, new in zip(held, totals, strict=True):
                for total, value in zip(own, new, strict=True):
                    if value is not None:
                        with tf.device(total.device):
                            total.assign(value)
            return tf.constant(True)

        # The branch captures only variables, so that tensors stay on their devices.
        is_reduced = tf.cond(is_due, reduced, lambda: tf.constant(False))
        fill = tf.where(told.is_finite, tf.zeros([], tf.float64), float("nan"))
        grads: Sums = [[] for _ in held]
        for own, given in zip(held, grads, strict=True):
            for total, variable in zip(own, variables, strict=True):
                with tf.device(total.device):
                    value = total.read_value()
                    scaled = value * tf.cast(scale, value.dtype)
                    other = tf.fill(value.shape, tf.cast(fill, value.dtype))
                    grad = tf.where(is_reduced, scaled, other)
                    given.append(tf.cast(grad, tf.as_dtype(variable.dtype)))
        self._clear(sums, held, is_reduced, tf.logical_and(is_reduced, is_update))
        return grads

    def _clear(self, sums: Sums, held: Sums, now: Any, is_update: Any) -> None:
        """Zeroes reduced sums; an update zeroes all, as in Keras."""
        known = {id(total) for own in held for total in own}
        for total in (total for own in sums for total in own):
            with tf.device(total.device):
                is_empty = now if id(total) in known else is_update
                value = total.read_value()
                total.assign(tf.where(is_empty, tf.zeros_like(value), value))

    def settle(self, sum_ranks: Callable[..., Any] | None) -> bool:
        """Adds all sums to tower 0's accumulators; returns whether there were any."""
        has_changed = False
        for optimizer, sums in self._made.values():
            inner = inner_of(optimizer)
            if int(inner._iterations) % inner.gradient_accumulation_steps == 0:
                continue
            has_changed = True
            totals = [
                tf.add_n([total.read_value() for total in column])
                for column in zip(*sums, strict=True)
            ]
            if sum_ranks is not None:
                names = [f"accumulator {n}" for n in range(len(totals))]
                totals = sum_ranks(totals, names=names)
            for slot, total in zip(inner._accumulated_gradients, totals, strict=True):
                own = tf_variable(slot)
                own.assign_add(tf.cast(total, own.dtype))
            for total in (total for own in sums for total in own):
                total.assign(tf.zeros_like(total))
        return has_changed

    def _sums(self, optimizer: Any) -> Sums:
        if id(optimizer) not in self._made:
            trained = inner_of(optimizer)._trainable_variables
            with tf.init_scope():
                made = [[zeros_for(own, at) for own in trained] for at in self._towers]
            self._made[id(optimizer)] = optimizer, made
        return self._made[id(optimizer)][1]


def _read(total: tf.Variable) -> tf.Tensor:
    with tf.device(total.device):  # which the value read would otherwise leave
        return total.read_value()


def is_update_due(inner: Any) -> tf.Tensor:
    """Returns whether the next call of an optimizer's ``apply`` updates."""
    count = tf_variable(inner._iterations).read_value() + 1
    return tf.equal(count % inner.gradient_accumulation_steps, 0)


def keeps_dtype(variables: Sequence[Any]) -> bool:
    """Returns whether the variables' dtypes can hold sums of scaled gradients."""
    return all(tf.as_dtype(own.dtype).name not in _NARROW for own in variables)


def zeros_for(variable: Any, tower: Tower) -> tf.Variable:
    """Makes a tower's sum of a variable's gradients."""
    dtype = tf.as_dtype(variable.dtype)
    dtype = tf.float32 if dtype.name in _NARROW else dtype
    with tf.device(tower.device):
        return tf.Variable(tf.zeros(variable.shape, dtype), trainable=False)


def inner_of(optimizer: Any) -> Any:
    """Returns the optimizer in a ``LossScaleOptimizer``; any other as it is."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def scale_of(optimizer: Any) -> Any:
    """Returns an optimizer's loss scale, which a ``LossScaleOptimizer`` changes."""
    if inner_of(optimizer) is optimizer:
        return tf.constant(optimizer.loss_scale_factor or 1.0, tf.float64)
    return tf.cast(tf_variable(optimizer.dynamic_scale), tf.float64)
