"""From a caller's columns to filled variables, the same in both modes.

``prepare`` checks and plans and touches nothing; ``fill_stack`` frees the old
rows, then copies and assigns the new ones, device by device.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tw_rlload._loading.casts import Array
from tw_rlload._loading.columns import Column, Columns, check_lengths, read_columns
from tw_rlload._loading.plan import LoadPlan, Tail, plan_load
from tw_rlload._loading.specs import ColumnSpec
from tw_rlload._loading.staging import StagingPool, copy_rows, pad_rows

WEIGHTS = ColumnSpec("weights", np.dtype(np.float32), (), is_state=False)


class Writer(Protocol):
    """Fills the variables of the devices; a mode has one."""

    def empty(self, stack: int) -> None:
        """Frees the rows of a stack on all devices."""
        ...

    def write(self, stack: int, tower: int, column: int, rows: Array) -> None:
        """Makes ``rows`` the value of one variable."""
        ...


@dataclass(frozen=True)
class LoadOptions:
    """What all loads of one object have in common.

    Attributes:
      specs: C columns, states last.
      num_devices: K.
      max_per_device_batch_size: rows a device takes in one step, at most.
      tail: see ``plan_load``.
      check_finite: whether NaN is refused.
      stacks: how many batches the devices hold.
    """

    specs: tuple[ColumnSpec, ...]
    num_devices: int
    max_per_device_batch_size: int
    tail: Tail
    check_finite: bool
    stacks: int

    @property
    def stored(self) -> tuple[ColumnSpec, ...]:
        """The specs of the variables: the columns, and weights where pads are."""
        return (*self.specs, WEIGHTS) if self.tail == "pad" else self.specs


@dataclass(frozen=True)
class PreparedLoad:
    """A batch that was checked and planned.

    Attributes:
      plan: how it is cut.
      columns: C columns, states last.
      pads: whether a column of weights goes with them.
    """

    plan: LoadPlan
    columns: tuple[Column, ...]
    pads: bool

    @property
    def num_bytes(self) -> int:
        """Bytes on all devices together."""
        return self.plan.num_devices * sum(self.chunk_sizes)

    @property
    def chunk_sizes(self) -> list[int]:
        """Bytes of each variable of one device."""
        sizes = [
            _rows_on_device(self.plan, column.spec)
            * int(np.prod(column.row_shape, dtype=np.int64))
            * column.spec.dtype.itemsize
            for column in self.columns
        ]
        return sizes + [4 * self.plan.rows_per_device] * self.pads


def prepare(
    options: LoadOptions, inputs: Columns, states: Columns, *, caller: str
) -> PreparedLoad:
    """Reads, checks and plans a batch; touches nothing.

    Args:
      options: what to check against.
      inputs: columns with one row a row.
      states: columns with one row a sequence; empty without recurrence.
      caller: who asks; opens the message.

    Raises:
      ValueError, TypeError: see ``read_columns`` and ``plan_load``.
    """
    by_kind = []
    for is_state, given in ((False, inputs), (True, states)):
        specs = [spec for spec in options.specs if spec.is_state == is_state]
        by_kind.append(
            read_columns(specs, given, caller=caller, check_finite=options.check_finite)
        )
    rows = check_lengths(by_kind[0], caller=caller, what="columns")
    sequences = check_lengths(by_kind[1], caller=caller, what="states")
    plan = plan_load(
        rows,
        sequences if by_kind[1] else None,
        num_devices=options.num_devices,
        max_per_device_batch_size=options.max_per_device_batch_size,
        tail=options.tail,
        caller=caller,
    )
    columns = (*by_kind[0], *by_kind[1])
    return PreparedLoad(plan, columns, pads=options.tail == "pad")


def fill_stack(
    load: PreparedLoad, writer: Writer, staging: StagingPool, stack: int
) -> None:
    """Frees a stack's old rows and fills it with new ones.

    Args:
      load: what to load.
      writer: of the mode.
      staging: this stack's own memory.
      stack: which one.
    """
    writer.empty(stack)
    staging.keep_fitting(load.chunk_sizes * load.plan.num_devices)
    for k, shard in enumerate(load.plan.shards):
        for c, column in enumerate(load.columns):
            writer.write(stack, k, c, _chunk(load.plan, column, shard, staging))
        if load.pads:
            weights = _weights(load.plan, shard, staging)
            writer.write(stack, k, len(load.columns), weights)


def _chunk(plan: LoadPlan, column: Column, shard: range, staging: StagingPool) -> Array:
    length = 1 if column.spec.is_state else plan.sequence_length
    rows = range(shard.start * length, shard.stop * length)
    shape = (_rows_on_device(plan, column.spec), *column.row_shape)
    chunk = staging.take(shape, column.spec.dtype)
    copy_rows(column, rows, chunk)
    pad_rows(chunk, len(rows), length)
    return chunk


def _weights(plan: LoadPlan, shard: range, staging: StagingPool) -> Array:
    weights = staging.take((plan.rows_per_device,), WEIGHTS.dtype)
    num_real = len(shard) * plan.sequence_length
    weights[:num_real] = 1
    weights[num_real:] = 0
    return weights


def _rows_on_device(plan: LoadPlan, spec: ColumnSpec) -> int:
    return plan.sequences_per_device if spec.is_state else plan.rows_per_device
