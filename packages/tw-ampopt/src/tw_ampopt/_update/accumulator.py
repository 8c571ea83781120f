"""A group of micro-batches: their gradients summed, until it is full.

Every tower sums its own; nothing is reduced before the group is full. How many
micro-batches the group has is read when it starts, so that a multiplier that
changes meanwhile does not spoil the mean.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from tw_ampopt._update.buffers import Buffer
from tw_ampopt._update.finite import verdict
from tw_ampopt._update.multiplier import Multiplier, count_of
from tw_ampopt._variables import make_state


class GroupProgress(NamedTuple):
    """How far a group is.

    Attributes:
      full: bool scalar, whether the group is complete.
      seen: int64 scalar, its micro-batches so far.
      summed: int64 scalar, those of them that were added.
    """

    full: tf.Tensor
    seen: tf.Tensor
    summed: tf.Tensor


class MicroBatchGroup:
    """Accumulators of K towers, and the counts that say when they are full.

    Attributes:
      sums: [K][M] float32 variables on the towers' devices.
      count: micro-batches of the present group so far.
      summed: those of them that were added; only where bad ones are dropped.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        devices: Sequence[str],
        *,
        multiplier: Multiplier,
        drops: bool,
        host: str,
        local: bool,
        caller: str,
    ) -> None:
        """Makes the state.

        Args:
          shapes: [M] shapes of a tower's buffers.
          devices: [K] towers' devices.
          multiplier: micro-batches in a group.
          drops: whether a micro-batch that is not finite stays out of the sums.
          host: where the counts live.
          local: whether a session graph's saver leaves the state out.
          caller: opens the message about a bad multiplier.
        """
        self._multiplier = multiplier
        self._devices = tuple(devices)
        self._host = host
        self._caller = caller
        self.count = make_state(0, name="grad_acc_count", device=host, local=local)
        self.wanted = make_state(0, name="grad_acc_wanted", device=host, local=local)
        self.summed: tf.Variable | None = None
        self.dropped: tf.Variable | None = None
        if drops:
            self.summed = make_state(0, name="grad_acc_good", device=host, local=local)
            self.dropped = make_state(0, name="dropped", device=host, local=local)
        self.sums = [
            [_accumulator(k, m, shape, device, local) for m, shape in enumerate(shapes)]
            for k, device in enumerate(devices)
        ]

    def state(self) -> list[tf.Variable]:
        """Lists what ``reset`` and a checkpoint are about."""
        counts = [self.count, self.wanted, self.summed, self.dropped]
        sums = [variable for tower in self.sums for variable in tower]
        return [*(variable for variable in counts if variable is not None), *sums]

    def add(
        self, buffers: Sequence[Sequence[Buffer]], inverse: tf.Tensor | None
    ) -> GroupProgress:
        """Adds a micro-batch, unscaled on the way.

        Args:
          buffers: [K][M].
          inverse: float32 scalar that unscales them, or None.

        Returns:
          How far the group is; the micro-batch has been added when that is known.
        """
        with tf.device(self._host or None):
            before = self.count.read_value()
            wanted = count_of(self._multiplier, caller=self._caller)
            wanted = tf.where(tf.equal(before, 0), wanted, self.wanted.read_value())
            seen = before + 1
            full = seen >= wanted
        with tf.control_dependencies([wanted]):  # a bad multiplier changes nothing
            summed, added = self._add_where_good(buffers, inverse, seen)
        with tf.device(self._host), tf.control_dependencies(added):
            noted = [
                self.wanted.assign(wanted, read_value=False),
                self.count.assign(
                    tf.where(full, tf.zeros_like(seen), seen), read_value=False
                ),
            ]
            with tf.control_dependencies(noted):
                return GroupProgress(tf.identity(full), seen, tf.identity(summed))

    def take(self) -> tuple[list[list[tf.Tensor]], list[tf.Operation]]:
        """Reads the sums and starts a new group.

        Returns:
          [K][M] sums, and the ops that empty the accumulators once they are read.
        """
        values, emptied = [], []
        for device, sums in zip(self._devices, self.sums, strict=True):
            with tf.device(device or None):
                tower = [variable.read_value() for variable in sums]
                with tf.control_dependencies(tower):
                    emptied += [
                        variable.assign(tf.zeros(variable.shape), read_value=False)
                        for variable in sums
                    ]
            values.append(tower)
        if self.summed is not None:
            emptied.append(self.summed.assign(0, read_value=False))
        return values, emptied

    def _add_where_good(
        self,
        buffers: Sequence[Sequence[Buffer]],
        inverse: tf.Tensor | None,
        seen: tf.Tensor,
    ) -> tuple[tf.Tensor, list[Any]]:
        add_all = partial(self._add_all, buffers, inverse)
        if self.summed is None or self.dropped is None:
            return seen, add_all()
        return self._add_or_drop(buffers, add_all, self.summed, self.dropped)

    def _add_or_drop(
        self,
        buffers: Sequence[Sequence[Buffer]],
        add_all: Callable[[], list[Any]],
        summed: tf.Variable,
        dropped: tf.Variable,
    ) -> tuple[tf.Tensor, list[Any]]:
        def keep() -> tf.Tensor:
            noted = summed.assign_add(1, read_value=False)
            return _true_after([*add_all(), noted])

        def drop() -> tf.Tensor:
            return _true_after([dropped.assign_add(1, read_value=False)])

        good = _all_towers_finite(self._devices, buffers)
        with tf.control_dependencies([tf.cond(good, keep, drop)]):
            total = summed.read_value()
        return total, [total]

    def _add_all(
        self, buffers: Sequence[Sequence[Buffer]], inverse: tf.Tensor | None
    ) -> list[Any]:
        ops = []
        for device, sums, tower in zip(self._devices, self.sums, buffers, strict=True):
            with tf.device(device or None):
                minus = None if inverse is None else -inverse
                ops += [_add(v, b, minus) for v, b in zip(sums, tower, strict=True)]
        return ops


def _add(variable: tf.Variable, buffer: Buffer, minus_inverse: tf.Tensor | None) -> Any:
    if isinstance(buffer, tf.IndexedSlices):
        rows = buffer.values
        return tf.raw_ops.ResourceScatterAdd(
            resource=variable.handle,
            indices=buffer.indices,
            updates=rows if minus_inverse is None else rows * -minus_inverse,
        )
    if minus_inverse is None:
        return variable.assign_add(buffer, read_value=False)
    # A step against the gradient by a negative rate: it multiplies and adds in one
    # pass, where a product of its own would write and read the model once more.
    return tf.raw_ops.ResourceApplyGradientDescent(
        var=variable.handle, alpha=minus_inverse, delta=buffer
    )


def _true_after(ops: Sequence[Any]) -> tf.Tensor:
    # Outside of graphs an assignment gives None, and has happened.
    with tf.control_dependencies([op for op in ops if op is not None]):
        return tf.constant(True)


def _all_towers_finite(
    devices: Sequence[str], buffers: Sequence[Sequence[Buffer]]
) -> tf.Tensor:
    verdicts = []
    for device, tower in zip(devices, buffers, strict=True):
        with tf.device(device or None):
            verdicts.append(verdict(tower)[0])
    return tf.reduce_all(tf.stack(verdicts)) if len(verdicts) > 1 else verdicts[0]


def _accumulator(
    k: int, m: int, shape: tuple[int, ...], device: str, local: bool
) -> tf.Variable:
    return make_state(
        lambda: tf.zeros(shape, tf.float32),
        name=f"tower{k}/grad_acc_{m}",
        device=device,
        local=local,
    )
