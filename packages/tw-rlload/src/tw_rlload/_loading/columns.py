"""A caller's batch, read into columns, checked, and planned.

A column is an array, a tensor, or a list of such fragments, which are read as if joined
along axis 0 but are never joined. Columns are passed as a list in the order of the
specs, or as a dictionary by name. Everything is checked here, and every offender named,
before any row is copied.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tw_rlload._loading.plan import LoadPlan
from tw_rlload._loading.specs import Array, ColumnSpec, DType, cast_fault

Columns: TypeAlias = "Sequence[Any] | Mapping[str, Any]"

# Values are checked in blocks of rows of about this size, to save memory.
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Column:
    """The checked rows of one column."""

    spec: ColumnSpec
    fragments: tuple[Array, ...]  # not copied; at least one, of equal inner shape

    @property
    def rows(self) -> int:
        """Rows of all fragments together."""
        return sum(len(fragment) for fragment in self.fragments)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.fragments[0].shape[1:]


@dataclass(frozen=True)
class PreparedLoad:
    """A batch that was checked and planned."""

    plan: LoadPlan
    columns: tuple[Column, ...]  # states last

    def chunk_shape(self, column: Column) -> tuple[int, ...]:
        """Shape of a column's variable on one device."""
        plan, is_state = self.plan, column.spec.is_state
        rows = plan.sequences_per_device if is_state else plan.rows_per_device
        return (rows, *column.row_shape)

    @property
    def chunk_sizes(self) -> list[int]:
        """Bytes of each variable of one device, weights included."""
        sizes = [
            math.prod(self.chunk_shape(column)) * column.spec.dtype.itemsize
            for column in self.columns
        ]
        has_weights = self.plan.remainder == "pad"
        return sizes + [4 * self.plan.rows_per_device] * has_weights


def prepare(
    specs: Sequence[ColumnSpec],
    inputs: Columns,
    states: Columns,
    cut: Callable[..., LoadPlan],
    *,
    check_finite: bool,
) -> PreparedLoad:
    """Reads, checks and plans a batch by ``cut``, without copying or writing rows."""
    columns: list[Column] = []
    lengths: list[int | None] = []
    for given, is_state in ((inputs, False), (states, True)):
        own = [spec for spec in specs if spec.is_state == is_state]
        read = read_columns(own, given, check_finite=check_finite)
        rows = {column.spec.name: column.rows for column in read}
        if len(set(rows.values())) > 1:
            raise ValueError(
                f"All {'states' if is_state else 'columns'} must have the same number "
                f"of rows; got {rows}."
            )
        columns += read
        lengths.append(next(iter(rows.values()), None))
    return PreparedLoad(cut(*lengths), tuple(columns))


def read_columns(
    specs: Sequence[ColumnSpec], given: Columns, *, check_finite: bool
) -> list[Column]:
    """Reads columns in the order of their specs, and checks them."""
    columns = [
        Column(spec, _fragments(spec.name, value))
        for spec, value in zip(specs, _in_order(specs, given), strict=True)
    ]
    problems = [
        f"  - {fault}"
        for column in columns
        for fault in _faults(column, check_finite=check_finite)
    ]
    if problems:
        listed = "\n".join(problems)
        raise ValueError(f"batch rejected; invalid columns:\n{listed}")
    return columns


def _in_order(specs: Sequence[ColumnSpec], given: Columns) -> list[Any]:
    names = [spec.name for spec in specs]
    if isinstance(given, Mapping):
        missing = [name for name in names if name not in given]
        unknown = [name for name in given if name not in names]
        if missing or unknown:
            raise ValueError(
                f"columns must be {names}; missing: {missing}, unknown: {unknown}."
            )
        return [given[name] for name in names]
    if isinstance(given, np.ndarray | str | bytes) or not isinstance(given, Sequence):
        raise TypeError(
            f"columns must be a list or a dictionary; got {type(given).__name__}. Pass "
            f"{names}."
        )
    if len(given) != len(specs):
        raise ValueError(f"Pass {len(specs)} columns {names}; got {len(given)}.")
    return list(given)


def _fragments(name: str, value: Any) -> tuple[Array, ...]:
    are_fragments = isinstance(value, list | tuple) and all(
        (isinstance(item, np.ndarray) or tf.is_tensor(item)) and len(item.shape) > 0
        for item in value
    )
    fragments = value if are_fragments and value else [value]
    return tuple(_as_array(name, fragment) for fragment in fragments)


def _as_array(name: str, value: Any) -> Array:
    if tf.is_tensor(value) and not hasattr(value, "numpy"):
        raise TypeError(
            f"Column {name!r} is a symbolic tensor, {value}; only arrays and eager "
            "tensors have rows to copy. Run it in a session first."
        )
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(
            f"Column {name!r} is not a rectangular array: {error}. Pad its rows to one "
            "length."
        ) from error


def _faults(column: Column, *, check_finite: bool) -> Iterator[str]:
    spec = column.spec
    for i, fragment in enumerate(column.fragments):
        who = repr(spec.name)
        if len(column.fragments) > 1:
            who += f" fragment {i}"
        if fragment.dtype.kind in "OSU":
            yield f"{who} is an array of {fragment.dtype}; must be {spec.dtype.name}"
        elif fault := _shape_fault(fragment, column):
            yield f"{who} {fault}"
        else:
            faults = _value_faults(fragment, spec.dtype, check_finite=check_finite)
            yield from (f"{who}: {fault}" for fault in faults)


def _shape_fault(fragment: Array, column: Column) -> str | None:
    shape, wanted = list(fragment.shape), [None, *column.spec.inner_shape]
    if len(shape) != len(wanted):
        return f"has rank {fragment.ndim} (shape {shape}); must be {wanted}"
    if any(w not in (None, g) for g, w in zip(shape, wanted, strict=True)):
        return f"has shape {shape}; must be {wanted}"
    first = list(column.row_shape)
    if shape[1:] != first:
        return f"has rows of shape {shape[1:]}, but fragment 0 of {first}"
    return None


def _value_faults(
    fragment: Array, wanted: DType, *, check_finite: bool
) -> Iterator[str]:
    fault = cast_fault(fragment, wanted)
    if fault:
        yield fault
    if check_finite and fragment.dtype.kind not in "biu":
        bad = sum(int(np.sum(~np.isfinite(block))) for block in _blocks(fragment))
        if bad:
            yield f"{bad} of {fragment.size} values are NaN or infinite"


def _blocks(fragment: Array) -> Iterator[Array]:
    row_bytes = max(fragment[:1].nbytes, 1)
    step = max(_BLOCK_BYTES // row_bytes, 1)
    for start in range(0, len(fragment), step):
        yield fragment[start : start + step]
