"""Own memory between the caller's arrays and the devices' variables.

A session adopts a fed array as a variable's memory where the array starts at a
multiple of 64 bytes and the device is a CPU. So rows are always copied into
buffers of our own: the caller's array is never adopted, and on CPUs the copy is
the only one. A buffer is written again when nothing refers to the array that was
handed out over it, which a weak reference tells: TensorFlow lets go of it when
the variable does.
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tw_rlload._loading.casts import Array, DType
from tw_rlload._loading.columns import Column

_ALIGNMENT = 64


@dataclass
class _Buffer:
    memory: Array
    user: "weakref.ref[Array] | None" = None

    @property
    def is_free(self) -> bool:
        return self.user is None or self.user() is None


class StagingPool:
    """Aligned buffers, kept from load to load."""

    def __init__(self) -> None:
        """Starts empty."""
        self._buffers: list[_Buffer] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def keep_fitting(self, sizes: Sequence[int]) -> None:
        """Lets go of free buffers that a load of these sizes could not use.

        Args:
          sizes: bytes of each array that will be taken.
        """
        wanted = sorted(sizes, reverse=True)
        kept = []
        for buffer in sorted(self._buffers, key=_size, reverse=True):
            fitting = next((n for n in wanted if _fits(buffer, n)), None)
            if fitting is not None:
                wanted.remove(fitting)
            if fitting is not None or not buffer.is_free:
                kept.append(buffer)
        self._buffers = kept

    def take(self, shape: Sequence[int], dtype: DType) -> Array:
        """Hands out an array; its buffer is taken for as long as the array lives.

        Args:
          shape: of the array.
          dtype: of the array.

        Returns:
          An array with arbitrary contents that starts at a multiple of 64 bytes.
        """
        size = math.prod(shape) * dtype.itemsize
        free = [b for b in self._buffers if b.is_free and _fits(b, size)]
        if free:
            buffer = min(free, key=_size)
        else:
            buffer = _Buffer(_aligned(size))
            self._buffers.append(buffer)
        array = buffer.memory[:size].view(dtype).reshape(tuple(shape))
        buffer.user = weakref.ref(array)
        return array


def copy_rows(column: Column, rows: range, out: Array) -> None:
    """Copies rows of a column, straight from its fragments, and adds pads.

    Args:
      column: where from.
      rows: which rows, counted over all fragments; at least one sequence.
      out: [N, ...] with N >= len(rows), and N - len(rows) rows of pads at the
        end, which become copies of the rows before them.
    """
    done, start = 0, 0
    for fragment in column.fragments:
        first = max(rows.start - start, 0)
        part = fragment[first : max(rows.stop - start, 0)]
        np.copyto(out[done : done + len(part)], part, casting="unsafe")
        done += len(part)
        start += len(fragment)


def pad_rows(out: Array, num_real: int, sequence_rows: int) -> None:
    """Fills the end of ``out`` with copies of its last real sequence.

    Args:
      out: [N, ...].
      num_real: rows that are there already.
      sequence_rows: rows of a sequence in this column.
    """
    last = out[num_real - sequence_rows : num_real]
    for start in range(num_real, len(out), sequence_rows):
        out[start : start + sequence_rows] = last


def _aligned(size: int) -> Array:
    memory: Any = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    aligned: Array = memory[start : start + size]
    return aligned


def _fits(buffer: _Buffer, size: int) -> bool:
    # A much larger buffer would hold memory that a smaller batch does not need.
    return size <= buffer.memory.nbytes <= size + size // 4 + 4096


def _size(buffer: _Buffer) -> int:
    return buffer.memory.nbytes
