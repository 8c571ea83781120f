"""The variables that hold a batch, and filling them through our own memory.

The variables are in no collection: a saver, an initialiser or a summary of "all
variables" leaves them alone. Assigning zero rows frees their memory, both in a graph
and eagerly.

A session adopts a fed array as a variable's memory if the array starts at a multiple
of 64 bytes and the device is a CPU. So rows are always copied into our own blocks: the
caller's array is never adopted, and on CPUs the copy is the only one. A block is reused
when the array over it is gone, as a weak reference shows: TensorFlow releases the array
with the variable's value.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tw_core import Tower, map_towers
from tw_core.internal import Recorder
from tw_rlload._loading.columns import Column, PreparedLoad
from tw_rlload._loading.specs import WEIGHTS, Array, ColumnSpec, DataVariables, DType

_ALIGNMENT = 64
ALL_TOWERS = "all towers"


def make_data_variables(
    towers: Sequence[Tower], specs: Sequence[ColumnSpec], num_buffers: int
) -> DataVariables:
    """Makes empty variables, per buffer, tower and column, on the towers' devices."""
    return [
        map_towers(lambda _: [_variable(spec) for spec in specs], towers)
        for _ in range(num_buffers)
    ]


def no_rows(variable: tf.Variable) -> tf.Tensor:
    """Returns the value that frees a data variable's memory."""
    return tf.zeros(_without_rows(variable.shape.as_list()[1:]), variable.dtype)


class Writer(NamedTuple):
    """Fills the variables of the devices; each mode has its own."""

    empty: Callable[[int], None]  # frees the rows of a buffer on all devices
    # (buffer, tower, column, rows); a CPU device adopts the memory of the rows.
    write: Callable[[int, int, int, Array], None]


@dataclass
class _Block:
    memory: Array
    user: "weakref.ref[Array] | None" = None

    @property
    def is_free(self) -> bool:
        return self.user is None or self.user() is None

    @property
    def size(self) -> int:
        return self.memory.nbytes

    def fits(self, size: int) -> bool:
        # A much larger block would keep memory that a smaller batch does not need.
        return size <= self.size <= size + size // 4 + 4096


class StagingPool:
    """Aligned blocks of memory, kept from load to load."""

    def __init__(self) -> None:
        """Starts empty."""
        self._blocks: list[_Block] = []

    def keep_fitting(self, sizes: Sequence[int]) -> None:
        """Releases free blocks that a load of these sizes, in bytes, could not use."""
        wanted = sorted(sizes, reverse=True)
        kept = []
        for block in sorted(self._blocks, key=lambda b: b.size, reverse=True):
            fitting = next((n for n in wanted if block.fits(n)), None)
            if fitting is not None:
                wanted.remove(fitting)
            if fitting is not None or not block.is_free:
                kept.append(block)
        self._blocks = kept

    def take(self, shape: Sequence[int], dtype: DType) -> Array:
        """Returns an uninitialised array, which uses its block while it exists."""
        size = math.prod(shape) * dtype.itemsize
        free = [b for b in self._blocks if b.is_free and b.fits(size)]
        if free:
            block = min(free, key=lambda b: b.size)
        else:
            block = _Block(_aligned(size))
            self._blocks.append(block)
        array = block.memory[:size].view(dtype).reshape(tuple(shape))
        block.user = weakref.ref(array)
        return array


def fill(
    load: PreparedLoad,
    writer: Writer,
    staging: StagingPool,
    buffer: int,
    events: Recorder,
) -> None:
    """Frees a buffer's old rows, then copies and assigns new ones, device by device."""
    with events.during(ALL_TOWERS, "freeing buffer", buffer):
        writer.empty(buffer)
    plan = load.plan
    staging.keep_fitting(load.chunk_sizes * plan.num_devices)
    for k, shard in enumerate(plan.shards):
        tower = f"tower {k}"
        for c, column in enumerate(load.columns):
            with events.during(tower, f"column {column.spec.name!r}"):
                chunk = staging.take(load.chunk_shape(column), column.spec.dtype)
                length = 1 if column.spec.is_state else plan.sequence_length
                rows = range(shard.start * length, shard.stop * length)
                copy_rows(column, rows, chunk)
                pad_rows(chunk, len(rows), length)
                writer.write(buffer, k, c, chunk)
                del chunk  # Otherwise its block would not be free for the next one.
        if plan.remainder == "pad":
            weights = staging.take((plan.rows_per_device,), WEIGHTS.dtype)
            num_real = len(shard) * plan.sequence_length
            weights[:num_real], weights[num_real:] = 1, 0
            with events.during(tower, "weights of rows"):
                writer.write(buffer, k, len(load.columns), weights)
            del weights


def copy_rows(column: Column, rows: range, out: Array) -> None:
    """Copies rows, numbered over all fragments; any rest of ``out`` stays as it is."""
    done, start = 0, 0
    for fragment in column.fragments:
        first = max(rows.start - start, 0)
        part = fragment[first : max(rows.stop - start, 0)]
        np.copyto(out[done : done + len(part)], part, casting="unsafe")
        done += len(part)
        start += len(fragment)


def pad_rows(out: Array, num_real: int, sequence_rows: int) -> None:
    """Fills ``out`` after ``num_real`` rows with copies of the last real sequence."""
    last = out[num_real - sequence_rows : num_real]
    for start in range(num_real, len(out), sequence_rows):
        out[start : start + sequence_rows] = last


def _aligned(size: int) -> Array:
    memory: Any = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    aligned: Array = memory[start : start + size]
    return aligned


def _variable(spec: ColumnSpec) -> tf.Variable:
    return tf.compat.v1.Variable(
        lambda: tf.zeros(_without_rows(spec.inner_shape), spec.dtype),
        trainable=False,
        collections=[],
        use_resource=True,
        dtype=spec.dtype,
        shape=tf.TensorShape([None, *spec.inner_shape]),
        name=f"loaded/{spec.name}",
    )


def _without_rows(inner_shape: Sequence[int | None]) -> list[int]:
    return [0, *(size or 0 for size in inner_shape)]
