"""Tensors added to the first sum of a reducer with memory, and a count of bytes."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_core.internal import (
    MESSAGE_BYTES,
    all_gather,
    all_to_all,
    bytes_sent,
    values_of,
)
from tw_reduce._reducer import Reducer, Tensorlike, TowerTensors

FEWEST_IN_PARTS = 3
"""Two ranks send as much either way, and whole rows in fewer messages."""


class Sent:
    """Counts what tower 0 sends in a step, as it is traced."""

    def __init__(
        self,
        gradients: Sequence[Tensorlike] = (),
        *,
        num_towers: int = 1,
        cuts: bool = False,
    ) -> None:
        """Takes whether more than two ranks exchange parts of rows that can be cut."""
        self._num_towers, self._cuts = num_towers, cuts
        self._of_gradients = list(map(_sized, gradients))
        self._dense: list[list[tuple[str, int]]] = []  # by sum: dtypes and bytes
        self._of_rows: list[int] = []  # bytes
        self._of_cut: list[int] = []  # of rows that are cut into parts
        self._num_unknown, self._has_parts = 0, False

    def note(self, tensors: Sequence[Tensorlike]) -> None:
        """Counts the tensors of one sum."""
        self._num_unknown += sum(_num_unknown(own) for own in tensors)
        dense = []
        for own in tensors:
            if not isinstance(own, tf.IndexedSlices):
                dense.append(_sized(own))
            elif self._cuts and getattr(own, "cuts", False):
                self._of_cut.append(_sized(own)[1])
            else:
                self._of_rows.append(_sized(own)[1])
        self._dense.append(dense)

    def note_parts(self, words: tf.Tensor) -> None:
        """Counts the parts, [R, words], of which ranks exchange the sums, too."""
        self._of_cut.append(_sized(words)[1])
        self._has_parts = True

    def describe(self, ranks: int | None = None) -> str:
        """Returns the counts in words, or what a rank of so many sends."""
        unknown, others = self._num_unknown, (ranks or 1) - 1
        more = f" and {unknown} tensors of unknown size" if unknown else ""
        if ranks is None:
            sent = sum(size for dense in self._dense for _, size in dense)
            sent += sum(self._of_rows) + sum(self._of_cut)
            sums = f"{len(self._dense)} sums" + " and in parts" * self._has_parts
            total = sum(size for _, size in self._of_gradients)
            return f"{sent:,} bytes{more} in {sums}, for gradients of {total:,} bytes"
        sent = sum(bytes_sent(dense, ranks) for dense in self._dense)
        # Numbers of rows, values and indices are gathered.
        whole = [own * self._num_towers for own in self._of_rows]
        parts = self._of_cut if ranks >= FEWEST_IN_PARTS else []
        whole += self._of_cut if not parts else []
        sent += others * sum(own + 3 * MESSAGE_BYTES for own in whole)
        sent += 2 * others * sum(own // ranks + MESSAGE_BYTES for own in parts)
        return (
            f"{sent:,} bytes{more} to {others} other ranks, where gradients take "
            f"{bytes_sent(self._of_gradients, ranks):,}"
        )


class Carried:
    """Adds sparse gradients, and whether all are finite, to a step's first sum.

    It has a group if ranks exchange parts, by two more methods.
    """

    def __init__(
        self,
        add: Reducer,
        dense: TowerTensors,
        beside: TowerTensors,
        sent: Sent,
        group: Any = None,
    ) -> None:
        self._reduce, self._sent, self.group = add, sent, group
        self._beside = [
            [*own, _is_nonfinite([*tower, *own])]
            for tower, own in zip(dense, beside, strict=True)
        ]
        self._sums: list[list[Tensorlike]] | None = None
        self._num_parts = 0  # exchanges of parts, which have names of their own

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

    def all_to_all(self, words: tf.Tensor) -> tf.Tensor:
        """Sends row r to rank r; returns [R, words], all ranks' rows for this one."""
        self._sent.note_parts(words)
        self._num_parts += 1
        return all_to_all(self.group, words, name=f"compressed parts {self._num_parts}")

    def all_gather(self, words: tf.Tensor) -> tf.Tensor:
        """Returns [R, words] of all ranks' [1, words], after an all-to-all."""
        widths = [words.shape[1]] * self.group.size
        name = f"sums of compressed parts {self._num_parts}"
        return tf.stack(all_gather(self.group, words[0], widths, name=name))

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


def _parts(tensor: Tensorlike) -> list[tf.Tensor]:
    is_sparse = isinstance(tensor, tf.IndexedSlices)
    return [tensor.values, tensor.indices] if is_sparse else [tensor]


def _num_unknown(tensor: Tensorlike) -> int:
    return sum(own.shape.num_elements() is None for own in _parts(tensor))


def _sized(tensor: Tensorlike) -> tuple[str, int]:
    """Returns a tensor's dtype, and its bytes if they are known."""
    sizes = [(own.shape.num_elements() or 0) * own.dtype.size for own in _parts(tensor)]
    return tensor.dtype.name, sum(sizes)
