"""Takes one tower's rows of one step out of its variables, in both modes.

Variables are always read whole. TensorFlow gives the value without copying, and
a slice along axis 0 shares its memory where it can; a sparse read instead
(``tf.gather`` of the variable itself) would make every later read a copy.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tw_rlload._loading.variables import ColumnSpec


class MinibatchSlice(NamedTuple):
    """Where a step's rows lie; int32 scalars.

    Attributes:
      first: number of the step's first sequence on its device.
      count: sequences of a step on one device.
      length: rows of a sequence.
    """

    first: tf.Tensor
    count: tf.Tensor
    length: tf.Tensor


def slice_rows(
    variables: Sequence[tf.Variable], specs: Sequence[ColumnSpec], which: MinibatchSlice
) -> list[tf.Tensor]:
    """Slices consecutive sequences out of each column.

    Args:
      variables: C of them, of one tower.
      specs: theirs.
      which: which sequences.

    Returns:
      C tensors of ``count`` states or ``count * length`` rows, on the
      variables' device.
    """

    def consecutive(variable: tf.Variable, spec: ColumnSpec) -> tf.Tensor:
        first, count, length = which
        if not spec.is_state:
            first, count = first * length, count * length
        others = len(spec.inner_shape)
        begin = tf.stack([first, *[0] * others])
        size = tf.stack([count, *[-1] * others])
        return tf.slice(variable.read_value(), begin, size)

    return _of_each(consecutive, variables, specs)


def gather_rows(
    variables: Sequence[tf.Variable],
    specs: Sequence[ColumnSpec],
    sequences: tf.Tensor,
    length: tf.Tensor,
) -> list[tf.Tensor]:
    """Gathers sequences from anywhere in each column.

    Args:
      variables: C of them, of one tower.
      specs: theirs.
      sequences: [B] int32, numbers of sequences on this device.
      length: int32 scalar, rows of a sequence.

    Returns:
      As ``slice_rows``.
    """

    def scattered(variable: tf.Variable, spec: ColumnSpec) -> tf.Tensor:
        value = variable.read_value()
        if spec.is_state:
            return tf.gather(value, sequences)
        shape = tf.shape(value)
        whole = tf.concat([[shape[0] // length, length], shape[1:]], 0)
        picked = tf.gather(tf.reshape(value, whole), sequences)
        flat = tf.concat([[tf.size(sequences) * length], shape[1:]], 0)
        return tf.reshape(picked, flat)

    return _of_each(scattered, variables, specs)


def _of_each(
    take: Callable[[tf.Variable, ColumnSpec], tf.Tensor],
    variables: Sequence[tf.Variable],
    specs: Sequence[ColumnSpec],
) -> list[tf.Tensor]:
    rows = [take(v, spec) for v, spec in zip(variables, specs, strict=True)]
    for tensor, spec in zip(rows, specs, strict=True):
        tensor.set_shape([None, *spec.inner_shape])
    return rows
