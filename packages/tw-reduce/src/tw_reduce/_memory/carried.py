"""Tensors added to the first sum of a reducer with memory, and a count of bytes."""

from collections.abc import Sequence

import tensorflow as tf

from tw_core.internal import values_of
from tw_reduce._reducer import Reducer, Tensorlike, TowerTensors


class Sent:
    """Counts what tower 0 sends in a step, as it is traced."""

    def __init__(self, gradients: Sequence[Tensorlike] = ()) -> None:
        self._of_gradients = sum(_num_bytes(leaf) or 0 for leaf in _leaves(gradients))
        self._num_bytes = self._num_unknown = self._num_sums = 0

    def note(self, tensors: Sequence[Tensorlike]) -> None:
        """Counts the tensors of one sum."""
        self._num_sums += 1
        sizes = [_num_bytes(leaf) for leaf in _leaves(tensors)]
        self._num_unknown += sizes.count(None)
        self._num_bytes += sum(size or 0 for size in sizes)

    def describe(self) -> str:
        """Returns the counts in words."""
        unknown = self._num_unknown
        more = f" and {unknown} tensors of unknown size" if unknown else ""
        return (
            f"{self._num_bytes:,} bytes{more} in {self._num_sums} sums, for gradients "
            f"of {self._of_gradients:,} bytes"
        )


class Carried:
    """Adds sparse gradients, and whether all are finite, to a step's first sum."""

    def __init__(
        self, add: Reducer, dense: TowerTensors, beside: TowerTensors, sent: Sent
    ) -> None:
        self._reduce, self._sent = add, sent
        self._beside = [
            [*own, _is_nonfinite([*tower, *own])]
            for tower, own in zip(dense, beside, strict=True)
        ]
        self._sums: list[list[Tensorlike]] | None = None

    def __call__(self, tensors: TowerTensors) -> list[list[Tensorlike]]:
        """Adds a reducer's tensors over towers."""
        if self._sums is not None:
            return self._added(tensors) if tensors[0] else [[] for _ in tensors]
        count = len(tensors[0])
        both = zip(tensors, self._beside, strict=True)
        sums = self._added([[*own, *more] for own, more in both])
        self._sums = [list(row[count:]) for row in sums]
        return [list(row[:count]) for row in sums]

    def apart(self) -> Reducer:
        """Returns a sum for a branch, which counts only if it runs now.

        A sum in a branch cannot carry anything, so all is sent that would be.
        """
        self.finish()
        return self if tf.executing_eagerly() else self._reduce

    def finish(self) -> tuple[list[list[Tensorlike]], tf.Tensor]:
        """Returns the sums of sparse gradients, and whether all towers' are finite."""
        if self._sums is None:
            self._sums = self._added(self._beside)
        count = self._sums[0][-1]
        return [row[:-1] for row in self._sums], tf.equal(count, 0.0)

    def _added(self, tensors: TowerTensors) -> list[list[Tensorlike]]:
        self._sent.note(tensors[0])
        return self._reduce(tensors)


def marked(sums: TowerTensors, is_finite: tf.Tensor) -> list[list[Tensorlike]]:
    """Makes each tower's smallest sum NaN where a gradient was not finite."""
    results = [list(own) for own in sums]
    for own in results:
        floating = [m for m, total in enumerate(own) if _can_be_nan(total.dtype)]
        if floating:
            m = min(floating, key=lambda m: own[m].shape.num_elements() or float("inf"))
            with tf.device(own[m].device):
                nan = tf.where(is_finite, tf.zeros([], tf.float64), float("nan"))
                own[m] += tf.cast(nan, own[m].dtype)
    return results


def _is_nonfinite(tensors: Sequence[Tensorlike]) -> tf.Tensor:
    """Returns 0.0 or 1.0, which can be added, on a tower's device."""
    finite = are_finite(tensors)
    with tf.device(finite.device):
        return tf.cast(tf.logical_not(finite), tf.float32)


def are_finite(tensors: Sequence[Tensorlike]) -> tf.Tensor:
    """Returns whether all elements of a tower's tensors are, on its device.

    Not their sum, which may overflow though each of them is finite.
    """
    flags = [tf.constant(True)]
    for tensor in map(values_of, tensors):
        if not _can_be_nan(tensor.dtype):
            continue
        with tf.device(tensor.device):
            reals = [tensor]
            if tensor.dtype.is_complex:
                reals = [tf.math.real(tensor), tf.math.imag(tensor)]
            flags += [tf.reduce_all(tf.math.is_finite(own)) for own in reals]
    with tf.device(flags[-1].device):
        return tf.reduce_all(tf.stack(flags))


def _can_be_nan(dtype: tf.DType) -> bool:
    return bool(dtype.is_floating or dtype.is_complex)


def _leaves(tensors: Sequence[Tensorlike]) -> list[tf.Tensor]:
    return list(tf.nest.flatten(list(tensors), expand_composites=True))


def _num_bytes(tensor: tf.Tensor) -> int | None:
    elements = tensor.shape.num_elements()
    return None if elements is None else int(elements * tensor.dtype.size)
