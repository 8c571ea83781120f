"""The towers' parts of a sum, or of joined rows, and how they are combined."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tw_core._tf_compat import with_gradient

CombineParts = Callable[[Sequence[tf.Tensor]], tf.Tensor]


def add_parts(
    column: Sequence[tf.Tensor], counted: Sequence[tf.Tensor] | None = None
) -> tf.Tensor:
    """Adds the towers' parts that count; the others may be NaN."""
    if counted is not None:
        zeros = tf.zeros_like(column[0])
        pairs = zip(counted, column, strict=True)
        column = [tf.where(counts, own, zeros) for counts, own in pairs]
    return tf.add_n(list(column))


def join_parts(
    column: Sequence[tf.Tensor], counted: Sequence[tf.Tensor] | None = None
) -> tf.Tensor:
    """Joins the towers' rows that count."""
    if counted is not None:
        sizes = sizes_of(column, counted)
        column = [own[:size] for own, size in zip(column, sizes, strict=True)]
    return tf.concat(column, 0)


def sizes_of(
    column: Sequence[tf.Tensor], counted: Sequence[tf.Tensor] | None = None
) -> list[tf.Tensor]:
    """Returns how many rows of the towers count."""
    sizes = [tf.shape(own)[0] for own in column]
    if counted is None:
        return sizes
    pairs = zip(counted, sizes, strict=False)
    return [tf.where(counts, size, 0) for counts, size in pairs]


def own_rows(total: tf.Tensor, own: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
    """Cuts the rows of a tower from those of all, where they are from ``first`` on."""
    # Padding, which is not among them, takes any other.
    first = tf.minimum(first, tf.shape(total)[0] - tf.shape(own)[0])
    begin = tf.pad(first[tf.newaxis], [[0, len(own.shape) - 1]])
    return tf.ensure_shape(tf.slice(total, begin, tf.shape(own)), own.shape)


def differentiable(
    totals: Sequence[tf.Tensor],
    tensors: Sequence[tf.Tensor],
    gradient: Callable[..., Sequence[Any]],
) -> list[tf.Tensor]:
    """Returns totals whose gradients flow back through a tower's own tensors."""
    sums = list(totals)
    chosen = [n for n, tensor in enumerate(tensors) if has_gradient(tensor)]
    if chosen:
        passed = with_gradient(
            [sums[n] for n in chosen], [tensors[n] for n in chosen], gradient
        )
        for n, total in zip(chosen, passed, strict=True):
            sums[n] = total
    return sums


def has_gradient(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)
