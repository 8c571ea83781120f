"""Gradient accumulation: sums over the micro-batches that make one update.

Every tower sums its own gradients; nothing is reduced before the accumulator is full.
The number of micro-batches per update is read when it starts to fill, so that a change
meanwhile does not spoil the mean. StyleGAN2's optimizer reads it for every micro-batch
instead, divides the micro-batch by it, and updates once it has seen that many.
``rereads`` does the same, with sums in the unit of the first number.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from tw_ampopt._update.buffers import on_devices
from tw_ampopt._update.weights import AccumulatedWeight
from tw_ampopt._variables import bool_after, make_state, present
from tw_core.gradients import Gradient
from tw_core.internal import (
    add_to_sums,
    clear_sums,
    compiles_with_xla,
    finite_and_norm,
    make_sums,
    weight_dtype,
    with_unique_rows,
)


class Progress(NamedTuple):
    """The fill level of an accumulator, in scalars."""

    full: tf.Tensor  # bool, whether the update is due
    seen: tf.Tensor  # int64, micro-batches so far
    summed: tf.Tensor  # int64, micro-batches added
    divisor: tf.Tensor  # of a weight's dtype, turns the sums over all towers into means


class _MicroBatch(NamedTuple):
    """A micro-batch to be added."""

    buffers: Sequence[Sequence[Gradient]]  # [K][M]
    factors: Sequence[tf.Tensor | None]  # [K], for the buffers
    empty: Sequence[tf.Tensor | None]  # [K] bool, whether a tower has weight 0
    note: Callable[[], list[Any]]  # returns the ops that record the weights
    jit: bool


class GradientAccumulator:
    """Sums of K towers, and the counts that determine when they are full."""

    def __init__(
        self,
        specs: Sequence[tf.TensorSpec],
        devices: Sequence[str],
        *,
        steps: int | tf.Tensor | tf.Variable,
        drops: bool,
        weighs: bool,
        host: str,
        steps_message: str,
        rereads: bool,
    ) -> None:
        """Makes the state; ``specs`` are those of a tower's M buffers."""
        self._wide = weight_dtype(specs)
        self.steps = steps
        self._steps_message = steps_message
        self._rereads = rereads
        self._devices = tuple(devices)
        self._host = host
        # Micro-batches since the last update was due: seen, and (if bad ones are
        # dropped) added. ``dropped`` counts all that were ever dropped.
        self.count = make_state(0, name="grad_acc_count", device=host)
        self.wanted = make_state(0, name="grad_acc_wanted", device=host)
        self.summed: tf.Variable | None = None
        self.dropped: tf.Variable | None = None
        if drops:
            self.summed = make_state(0, name="grad_acc_good", device=host)
            self.dropped = make_state(0, name="dropped", device=host)
        self.sums = []
        for k, device in enumerate(devices):
            with tf.init_scope(), tf.device(device or None):
                self.sums.append(make_sums(specs, name=f"tower{k}/grad_acc_{{}}"))
        self.weight: AccumulatedWeight | None = None
        if weighs:
            self.weight = AccumulatedWeight(len(devices), host, self._wide)

    @property
    def _divides_each(self) -> bool:
        """Whether each micro-batch is divided by the number read for it."""
        return self._rereads and self.weight is None and self.summed is None

    def state(self) -> list[tf.Variable]:
        """Lists the variables to be saved and reset."""
        counts = present([self.count, self.wanted, self.summed, self.dropped])
        sums = [variable for tower in self.sums for variable in tower]
        # Checkpoints identify them by position: new ones must be last.
        return [*counts, *sums, *([] if self.weight is None else self.weight.state())]

    def add(
        self,
        buffers: Sequence[Sequence[Gradient]],
        inverse: tf.Tensor | None,
        weights: Sequence[Any] | None,
        *,
        jit: bool,  # whether XLA compiles the work on the buffers
        group: Any,  # of ranks, which drop a micro-batch together; or None
    ) -> Progress:
        """Adds a [K][M] micro-batch; once the result is known, it has been added."""
        with tf.device(self._host or None):
            before = self.count.read_value()
            now = self._checked_steps()
            wanted = tf.where(tf.equal(before, 0), now, self.wanted.read_value())
            seen = before + 1
            full = seen >= (now if self._rereads else wanted)
            if self._divides_each:
                share = tf.cast(wanted, self._wide) / tf.cast(now, self._wide)
                inverse = share if inverse is None else share * inverse
            batch = self._weigh(buffers, inverse, weights, before, jit)
        with tf.control_dependencies([wanted]):  # an invalid number changes nothing
            summed, added = self._add_where_good(batch, seen, group)
        with tf.device(self._host), tf.control_dependencies(added):
            noted = [
                self.wanted.assign(wanted, read_value=False),
                self.count.assign(
                    tf.where(full, tf.zeros_like(seen), seen), read_value=False
                ),
            ]
            with tf.control_dependencies(noted):
                added_up = tf.identity(summed)
                if self.weight is None:
                    count = wanted if self._divides_each else summed
                    divisor = tf.cast(count, self._wide) * float(len(self._devices))
                else:
                    divisor = self.weight.divisor(summed)
            # If an update is due, nothing is emptied before the divisor is known.
            with tf.control_dependencies([divisor]):
                return Progress(tf.identity(full), seen, added_up, divisor)

    def take(self) -> tuple[list[list[tf.Tensor]], list[tf.Operation]]:
        """Returns [K][M] sums, and the ops that clear the state once these are read."""
        values, emptied = [], []
        for device, sums in zip(self._devices, self.sums, strict=True):
            with tf.device(device or None):
                tower = [variable.read_value() for variable in sums]
                with tf.control_dependencies(tower):
                    emptied += clear_sums(sums)
            values.append(tower)
        if self.summed is not None:
            emptied.append(self.summed.assign(0, read_value=False))
        if self.weight is not None:
            emptied += self.weight.clear()
        return values, emptied

    def average(self, group: Any) -> tf.Tensor:
        """Gives each rank the mean of all ranks' sums, in its tower 0's sums."""
        columns = list(zip(*self.sums, strict=True))
        names = [f"accumulated, {m}" for m in range(len(columns))]
        totals = [tf.add_n([own.read_value() for own in of]) for of in columns]
        means = [own / group.size for own in group.sum(totals, names=names)]
        for (first, *others), own in zip(columns, means, strict=True):
            first.assign(own)
            clear_sums(others)
        return tf.constant(True)

    def _weigh(
        self,
        buffers: Sequence[Sequence[Gradient]],
        inverse: tf.Tensor | None,
        weights: Sequence[Any] | None,
        before: tf.Tensor,
        jit: bool,
    ) -> _MicroBatch:
        nothing = [None] * len(buffers)
        factors: list[tf.Tensor | None] = [inverse] * len(buffers)
        if self.weight is None:
            return _MicroBatch(buffers, factors, nothing, list, jit)
        summed = before if self.summed is None else self.summed.read_value()
        shares, unit = self.weight.begin(weights, summed)
        factors = [tf.cast(share, self._wide) for share in shares]
        if inverse is not None:
            factors = [factor * inverse for factor in factors]
        empty = nothing if weights is None else [tf.equal(s, 0) for s in shares]
        note = partial(self.weight.add, shares, unit)
        return _MicroBatch(buffers, factors, empty, note, jit)

    def _checked_steps(self) -> tf.Tensor:
        if isinstance(self.steps, int):
            return tf.constant(self.steps, tf.int64)
        value = tf.convert_to_tensor(self.steps)
        count = tf.cast(value, tf.int64)
        good = tf.logical_and(count >= 1, tf.equal(tf.cast(count, value.dtype), value))
        check = tf.debugging.Assert(good, [self._steps_message, value])
        with tf.control_dependencies(present([check])):
            return tf.identity(count)

    def _add_where_good(
        self, batch: _MicroBatch, seen: tf.Tensor, group: Any
    ) -> tuple[tf.Tensor, list[Any]]:
        summed, dropped = self.summed, self.dropped
        if summed is None or dropped is None:
            return seen, self._add_all(batch)

        def keep() -> tf.Tensor:
            noted = summed.assign_add(1, read_value=False)
            return bool_after([*self._add_all(batch), noted], True)

        def drop() -> tf.Tensor:
            return bool_after([dropped.assign_add(1, read_value=False)], True)

        good = _all_towers_finite(self._devices, batch)
        if group is not None:
            bad = tf.cast(tf.logical_not(good), tf.float32)
            good = tf.equal(group.sum([bad], names=["if a micro-batch is bad"])[0], 0)
        with tf.control_dependencies([tf.cond(good, keep, drop)]):
            total = summed.read_value()
        return total, [total]

    def _add_all(self, batch: _MicroBatch) -> list[Any]:
        towers = (self.sums, batch.buffers, batch.factors, batch.empty)

        def add(*own: Any) -> list[Any]:
            ops = _add_tower(*own)
            return [bool_after(ops, True)] if batch.jit else ops

        added = on_devices(self._devices, add, *towers, jit_compile=batch.jit)
        with tf.device(self._host or None):
            return [*(op for ops in added for op in ops), *batch.note()]


def one_at_a_time(
    body: Callable[[], tf.Tensor],  # its effects have happened once the tensor is known
    *,
    mutex: str,  # its name
    device: str,  # a CPU
    after: Sequence[tf.Tensor],  # computed before waiting, while other bodies may run
) -> tf.Tensor:
    """Builds ``body`` so that bodies with the same mutex run one at a time.

    Adding to accumulators, counting, and emptying them are many reads and writes. A
    second step in between, from another thread or another call in flight, would lose
    gradients. A body that fails releases the mutex. XLA has no mutex and needs none: it
    locks the variables that a compiled function changes while that runs.
    """
    if compiles_with_xla():
        return body()
    with tf.device(device or None), tf.control_dependencies(after):
        # Made where it is used, and shared by name: a function that captured it could
        # not be exported.
        handle = tf.raw_ops.MutexV2(shared_name=mutex)
        lock = tf.raw_ops.MutexLock(mutex=handle)
    if tf.executing_eagerly():
        try:
            return body()
        finally:
            del lock  # an exception's traceback would hold it
    with tf.control_dependencies([lock]):
        result = body()
    with tf.device(device or None), tf.control_dependencies([result]):
        opened = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
    with tf.control_dependencies([opened]):
        return tf.identity(result)


def _add_tower(
    sums: Sequence[tf.Variable],
    buffers: Sequence[Gradient],
    factor: tf.Tensor | None,
    is_empty: tf.Tensor | None,
) -> list[Any]:
    add = partial(add_to_sums, sums, buffers, factor)
    if is_empty is None:
        return add()
    # A tower without rows has NaN gradients, and NaN * 0 is still NaN.
    nothing = partial(tf.constant, True)
    return [tf.cond(is_empty, nothing, lambda: bool_after(add(), True))]


def _all_towers_finite(devices: Sequence[str], batch: _MicroBatch) -> tf.Tensor:
    def is_good(tower: Sequence[Gradient], is_empty: tf.Tensor | None) -> tf.Tensor:
        finite = finite_and_norm(list(map(with_unique_rows, tower)))[0]
        return finite if is_empty is None else tf.logical_or(finite, is_empty)

    towers = (batch.buffers, batch.empty)
    finite = on_devices(devices, is_good, *towers, jit_compile=batch.jit)
    return tf.reduce_all(tf.stack(finite)) if len(finite) > 1 else finite[0]
