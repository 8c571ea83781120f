"""Tensors that sums keep separate: sent as one sparse row per tower."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tw_reduce._checks import check_items, named_compressor


class _Row(
    tf.IndexedSlices,  # type: ignore[misc] # TensorFlow is untyped
):
    """A row made here: its index is 0, so that it can be joined with others."""

    cuts = False  # whether it is exchanged in parts by ranks that do


class RowCompressor:
    """Compresses each row of a matrix to words: a whole tensor, or parts of it."""

    def __init__(
        self, name: str, compress: Callable[..., Any], *, cuts: bool = True
    ) -> None:
        """Takes what a user calls to make it, and the function of a matrix, [T, n].

        This returns tensors [T, ...], and a function that reads such tensors of any T:
        ``read(*tensors, apart=False)``. It returns the sum of the approximations, [n],
        or each of them, [T, n]. ``cuts``: whether ranks may exchange parts.
        """
        named_compressor(self, name)
        self._compress, self.cuts = compress, cuts

    def __call__(
        self, tensor: tf.Tensor
    ) -> tuple[list[tf.IndexedSlices], Callable[[tf.IndexedSlices], tf.Tensor]]:
        """Compresses a tensor to one row, as a ``Compressor`` does."""
        words, read = self.to_words(tf.reshape(tensor, [1, -1]))
        return [_as_row(words, cuts=self.cuts)], lambda rows: tf.reshape(
            read(rows.values), tensor.shape
        )

    def to_words(self, matrix: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tf.Tensor]]:
        """Returns [T, words] of [T, n], and the function that reads them."""
        tensors, read = self._compress(matrix)
        specs = [tf.TensorSpec(own.shape[1:], own.dtype) for own in tensors]

        def read_words(words: tf.Tensor, *, apart: bool = False) -> tf.Tensor:
            result: tf.Tensor = read(*_cut_words(words, specs), apart=apart)
            return result

        return tf.concat(list(map(_to_words, tensors)), 1), read_words


def to_row(tensors: Sequence[tf.Tensor]) -> tf.IndexedSlices:
    """Makes one sparse row of tensors' bytes.

    Args:
      tensors: of known shapes, and dtypes of 1, 2 or 4 bytes other than bool.

    Returns:
      A row of int32 with index 0. Sums over towers have one row per tower.

    Raises:
      TypeError: something that is not a list of tensors.
      ValueError: a tensor of unknown shape, or of a dtype of another size.
    """
    check_items(tf.Tensor, "tensors", "hold dense tensors", tensors=tensors)
    _check_fit(tensors=tensors)
    words = [_to_words(own[tf.newaxis]) for own in tensors]
    return _as_row(tf.concat([tf.zeros([1, 0], tf.int32), *words], 1))


def from_rows(
    rows: tf.IndexedSlices, specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """Returns the tensors in all towers' rows.

    Args:
      rows: a result of ``to_row``, or a sum of these over T towers.
      specs: shapes and dtypes of the tensors that each row was made of.

    Returns:
      Tensors of shape ``[T, *shape]``.

    Raises:
      TypeError: ``rows`` are not sparse, or ``specs`` not such a list.
      ValueError: ``specs`` are of other sizes than the rows, or do not fit ``to_row``.
    """
    if not isinstance(rows, tf.IndexedSlices):
        raise TypeError(f"rows must be tf.IndexedSlices; got {rows!r:.80}.")
    check_items(tf.TensorSpec, "specs", "hold a tf.TensorSpec each", specs=specs)
    _check_fit(specs=specs)
    counts = list(map(_num_words, specs))
    if not rows.values.shape.is_compatible_with([None, sum(counts)]):
        raise ValueError(
            f"specs must be those of the tensors in the rows; they take {sum(counts)} "
            f"words of four bytes, and rows have {rows.values.shape[-1]}."
        )
    return _cut_words(rows.values, specs)


def as_float32(values: tf.Tensor) -> tf.Tensor:
    """Casts values to be sent; of a larger float64 the rest is its error."""
    if values.dtype == tf.float64:
        values = tf.clip_by_value(values, tf.float32.min, tf.float32.max)
    return tf.cast(values, tf.float32)


def is_row(part: Any) -> bool:
    """Returns whether something is a row that ``to_row`` made."""
    return isinstance(part, _Row)


def join_rows(rows: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """Joins several rows into one, on the device of the first."""
    with tf.device(rows[0].values.device):
        words = tf.concat([own.values for own in rows], 1)
        return _as_row(words, cuts=all(own.cuts for own in rows))


def cut_row(rows: tf.IndexedSlices, widths: Sequence[int]) -> list[tf.IndexedSlices]:
    """Splits joined rows, of any number of towers."""
    with tf.device(rows.values.device):
        parts = tf.split(rows.values, widths, axis=1)
    return [tf.IndexedSlices(own, rows.indices) for own in parts]


def _check_fit(**argument: Sequence[Any]) -> None:
    """Refuses tensors, or specs, that do not fit into words, naming every position."""
    ((name, items),) = argument.items()
    unfit = [
        f"{n} ({own.dtype.name} {own.shape})"
        for n, own in enumerate(items)
        if own.dtype.size not in (1, 2, 4)
        or own.dtype == tf.bool
        or not own.shape.is_fully_defined()
    ]
    if unfit:
        raise ValueError(
            f"{name} must have known shapes, and dtypes of 1, 2 or 4 bytes other than "
            f"bool; got others at positions {', '.join(unfit)}. Cast the tensors, bool "
            "to tf.uint8."
        )


def _as_row(values: tf.Tensor, *, cuts: bool = False) -> tf.IndexedSlices:
    shape = tf.constant([1, values.shape[1]], tf.int64)
    row = _Row(values, tf.zeros([1], tf.int64), shape)
    row.cuts = cuts
    return row


def _num_words(spec: tf.TensorSpec) -> int:
    return -(-int(spec.shape.num_elements() * spec.dtype.size) // 4)


def _to_words(tensor: tf.Tensor) -> tf.Tensor:
    """Returns [T, words] of [T, ...]."""
    rows, per_word = tensor.shape[0], 4 // tensor.dtype.size
    flat = tf.reshape(tensor, [rows, tensor.shape[1:].num_elements()])
    if per_word == 1:
        return tf.bitcast(flat, tf.int32)
    missing = -flat.shape[1] % per_word
    if missing:
        flat = tf.concat([flat, tf.zeros([rows, missing], flat.dtype)], 1)
    words = flat.shape[1] // per_word
    return tf.bitcast(tf.reshape(flat, [rows, words, per_word]), tf.int32)


def _cut_words(words: tf.Tensor, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """Returns the tensors, [T, ...], in words of any number of rows."""
    counts = list(map(_num_words, specs))
    parts = tf.split(words, counts, axis=1) if counts else []
    return [_from_words(part, spec) for part, spec in zip(parts, specs, strict=True)]


def _from_words(words: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    values = tf.bitcast(words, spec.dtype)
    towers, elements = tf.shape(words)[0], spec.shape.num_elements()
    flat = tf.reshape(values, [towers, words.shape[1] * (4 // spec.dtype.size)])
    return tf.reshape(flat[:, :elements], [towers, *spec.shape])
