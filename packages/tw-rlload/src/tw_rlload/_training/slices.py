"""Takes one tower's rows of one step out of its variables, in both modes.

Variables are always read whole. TensorFlow gives the value without copying, and
a slice along axis 0 shares its memory where it can; a sparse read instead
(``tf.gather`` of the variable itself) would make every later read a copy.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tw_rlload._loading.specs import ColumnSpec


class Cut(NamedTuple):
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
    variables: Sequence[tf.Variable], specs: Sequence[ColumnSpec], cut: Cut
) -> list[tf.Tensor]:
    """Slices sequences that follow each other out of each column.

    Args:
      variables: C of them, of one tower.
      specs: theirs.
      cut: which sequences.

    Returns:
      C tensors of ``count`` states or ``count * length`` rows, on the
      variables' device.
    """
    rows = []
    for variable, spec in zip(variables, specs, strict=True):
        first, count = (cut.first, cut.count)
        if not spec.is_state:
            first, count = first * cut.length, count * cut.length
        others = len(spec.inner_shape)
        begin = tf.stack([first, *[0] * others])
        size = tf.stack([count, *[-1] * others])
        rows.append(tf.slice(variable.read_value(), begin, size))
    return _with_shapes(rows, specs)


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
    rows = []
    for variable, spec in zip(variables, specs, strict=True):
        value = variable.read_value()
        if spec.is_state:
            rows.append(tf.gather(value, sequences))
            continue
        shape = tf.shape(value)
        whole = tf.concat([[shape[0] // length, length], shape[1:]], 0)
        picked = tf.gather(tf.reshape(value, whole), sequences)
        flat = tf.concat([[tf.size(sequences) * length], shape[1:]], 0)
        rows.append(tf.reshape(picked, flat))
    return _with_shapes(rows, specs)


def pick_branch(
    number: tf.Tensor, branches: Sequence[Callable[[], list[tf.Tensor]]]
) -> list[tf.Tensor]:
    """Runs the branch of this number; no branching where there is one only.

    Args:
      number: int32 scalar.
      branches: each returns C tensors.

    Returns:
      C tensors.
    """
    if len(branches) == 1:
        return branches[0]()
    picked: list[tf.Tensor] = tf.switch_case(number, list(branches))
    return picked


def _with_shapes(
    rows: Sequence[tf.Tensor], specs: Sequence[ColumnSpec]
) -> list[tf.Tensor]:
    shaped = []
    for tensor, spec in zip(rows, specs, strict=True):
        tensor.set_shape([None, *spec.inner_shape])
        shaped.append(tensor)
    return shaped
