"""Sums over ranks of which each rank adds a part, so that bytes do not grow with them.

    full tensor of this rank, with what it remembers
        ├─ parts of others: compressed ──▶ all-to-all ──▶ their owners
        │     └ errors, remembered
        └─ its own part + those of all others
              │   the sum, compressed ──▶ all-gather ──▶ all ranks, which read all parts
              └ error, remembered

There are two kinds of errors, of what a rank sends and of the sums that it owns. The
owner adds its own part exactly, so its memory of that part is free for the error of the
sum: the memory has one tensor per variable, as without parts.

Source: the errors of workers and servers of Tang et al., "1-bit Adam: Communication
Efficient Large-Scale Training with Adam's Convergence Speed", ICML 2021.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tw_core.internal import plan_buckets
from tw_reduce._memory.carried import Carried
from tw_reduce._memory.rows import RowCompressor


@dataclass(frozen=True, eq=False)
class _Compressed:
    """A tensor in R parts, compressed."""

    full: tf.Tensor
    words: tf.Tensor  # [R, words]
    read: Callable[..., tf.Tensor]
    errors: tf.Tensor  # [R, elements], of words

    @classmethod
    def of(cls, full: tf.Tensor, compressor: RowCompressor, size: int) -> "_Compressed":
        with tf.device(full.device):
            parts = _in_rows(full, size)
            words, read = compressor.to_words(parts)
            return cls(full, words, read, parts - read(words, apart=True))


def add_in_parts(
    fulls: Sequence[tf.Tensor], compressor: RowCompressor, add: Carried
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the sums of tensors over the ranks, and this rank's errors."""
    group = add.group
    sent = [_Compressed.of(full, compressor, group.size) for full in fulls]
    sizes = [[4 * own.words.shape.num_elements()] for own in sent]
    buckets = plan_buckets(sizes, getattr(group, "bucket_bytes", None))
    found: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}
    for places in buckets:
        results = _exchange([sent[m] for m in places], compressor, add)
        found |= dict(zip(places, results, strict=True))
    results = [found[m] for m in range(len(sent))]
    return [total for total, _ in results], [errors for _, errors in results]


def _exchange(
    sent: Sequence[_Compressed], compressor: RowCompressor, add: Carried
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Returns the sum of each tensor, and this rank's errors."""
    rank, widths = add.group.rank, [own.words.shape[1] for own in sent]
    received = _cut(add.all_to_all(_join([own.words for own in sent])), widths)
    sums, left = [], []
    for own, words in zip(sent, received, strict=True):
        with tf.device(own.full.device):
            total = (own.read(words) + own.errors[rank])[tf.newaxis]
            compressed, _ = compressor.to_words(total)
            left.append(total - own.read(compressed, apart=True))
        sums.append(compressed)
    totals = _cut(add.all_gather(_join(sums)), widths)
    results = []
    for own, words, of_sum in zip(sent, totals, left, strict=True):
        with tf.device(own.full.device):
            error = own.errors
            new = tf.concat([error[:rank], of_sum, error[rank + 1 :]], 0)
            total = own.read(words, apart=True)
            results.append((_whole(total, own.full), _whole(new, own.full)))
    return results


def _in_rows(tensor: tf.Tensor, count: int) -> tf.Tensor:
    """Cuts a tensor into rows of one length, the last of which may end with zeros."""
    flat = tf.pad(tf.reshape(tensor, [-1]), [[0, -tensor.shape.num_elements() % count]])
    return tf.reshape(flat, [count, flat.shape[0] // count])


def _whole(rows: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    flat = tf.reshape(rows, [-1])[: like.shape.num_elements()]
    return tf.reshape(flat, like.shape)


def _join(words: Sequence[tf.Tensor]) -> tf.Tensor:
    with tf.device(words[0].device):
        return tf.concat(words, 1)


def _cut(words: tf.Tensor, widths: Sequence[int]) -> list[tf.Tensor]:
    with tf.device(words.device):
        return list(tf.split(words, widths, axis=1))
