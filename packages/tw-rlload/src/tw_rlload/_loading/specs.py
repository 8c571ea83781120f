"""The specs of columns, and the casts to their dtypes that would change values.

A float may lose digits (float64 to float32), as in feeds; it may not become an integer,
nor overflow. An integer must stay exact. Faults are found before anything is copied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tw_core.internal import check_list

Array = npt.NDArray[np.generic]
DType = np.dtype[np.generic]


@dataclass(frozen=True)
class ColumnSpec:
    """The name, dtype and shape that a column must have."""

    name: str
    dtype: DType
    inner_shape: tuple[int | None, ...]  # of one row; None: any size
    is_state: bool  # one row per sequence


WEIGHTS = ColumnSpec("weights", np.dtype(np.float32), (), is_state=False)


DataVariables: TypeAlias = "list[list[list[tf.Variable]]]"
"""[buffers][K][C], C columns on K devices."""


def specs_of_placeholders(
    inputs: Sequence[tf.Tensor], states: Sequence[tf.Tensor]
) -> tuple[ColumnSpec, ...]:
    """Returns the specs of placeholders, states last."""
    graph = tf.compat.v1.get_default_graph()
    for name, given in (("input_placeholders", inputs), ("rnn_inputs", states)):
        check_list(empty=name == "rnn_inputs", of="placeholders", **{name: given})
        others = [type(one).__name__ for one in given if not tf.is_symbolic_tensor(one)]
        if others:
            raise TypeError(
                f"{name} must hold placeholders, or other tensors of the graph; got "
                f"{others}. Pass arrays to load_data."
            )
        foreign = [tensor.name for tensor in given if tensor.graph is not graph]
        if foreign:
            raise ValueError(
                f"{name} must belong to the default graph; got tensors of another: "
                f"{foreign}."
            )
    return _specs([(t.op.name, t) for t in inputs], [(t.op.name, t) for t in states])


def specs_of_mappings(
    columns: Mapping[str, tf.TensorSpec], states: Mapping[str, tf.TensorSpec]
) -> tuple[ColumnSpec, ...]:
    """Returns the specs of named ``tf.TensorSpec``, states last."""
    for what, given in (("columns", columns), ("states", states)):
        if not isinstance(given, Mapping):
            raise TypeError(
                f"{what} must be a dictionary of tf.TensorSpec by name; got "
                f"{given!r:.80} ({type(given).__name__})."
            )
        others = {
            name: type(spec).__name__
            for name, spec in given.items()
            if not (isinstance(name, str) and isinstance(spec, tf.TensorSpec))
        }
        if others:
            raise TypeError(
                f"{what} must map names to tf.TensorSpec; got {others}. Write e.g. "
                "{'x': tf.TensorSpec([None, 17])}."
            )
    if not columns:
        raise ValueError("columns is empty; pass at least one column.")
    return _specs(list(columns.items()), list(states.items()))


def _specs(
    columns: Sequence[tuple[str, Any]], states: Sequence[tuple[str, Any]]
) -> tuple[ColumnSpec, ...]:
    names = [name for name, _ in (*columns, *states)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"columns and states must have unique names; twice: {twice}.")
    own = [make_spec(name, given, is_state=False) for name, given in columns]
    return (*own, *(make_spec(name, given, is_state=True) for name, given in states))


def make_spec(name: str, given: Any, *, is_state: bool) -> ColumnSpec:
    """Makes the spec of a placeholder or a ``tf.TensorSpec``."""
    shape, dtype = given.shape, given.dtype.base_dtype
    if not is_numeric(dtype):
        raise ValueError(
            f"Column {name!r} has dtype {dtype.name}; only floats, integers and bools "
            "can be loaded. Encode it as numbers."
        )
    if not shape.rank:
        raise ValueError(
            f"Column {name!r} has shape {shape}; rows are cut along axis 0, so the "
            "rank must be known and at least 1, as in [None, 17]."
        )
    np_dtype = np.dtype(dtype.as_numpy_dtype)
    return ColumnSpec(name, np_dtype, tuple(shape.as_list()[1:]), is_state)


def is_numeric(dtype: tf.DType) -> bool:
    """Returns whether values of a dtype can be loaded, fetched and averaged."""
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool)


def cast_fault(array: Array, wanted: DType) -> str | None:
    """Describes the loss of a cast to ``wanted``; None if it is lossless.

    Values are read only if the dtypes do not decide that.
    """
    given = array.dtype
    kinds = (_kind(given), _kind(wanted))
    if given == wanted or (kinds[0] == "bool" and kinds[1] in ("int", "float")):
        return None
    if kinds in (("int", "int"), ("int", "float")):
        return _integer_fault(array, wanted)
    if kinds == ("float", "float"):
        return _overflow_fault(array, wanted)
    if np.can_cast(given, wanted, "safe"):
        return None
    return f"{given.name} cannot be cast to {wanted.name} without loss"


def _kind(dtype: DType) -> str:
    if dtype.kind in "iu":
        return "int"
    # bfloat16 and the like are from ml_dtypes, whose kinds are not informative.
    if dtype.kind == "f" or "float" in dtype.name:
        return "float"
    return "bool" if dtype.kind == "b" else dtype.kind


def _integer_fault(array: Array, wanted: DType) -> str | None:
    """Finds integers outside of the range in which ``wanted`` holds every integer."""
    if _kind(wanted) == "int":
        limits = np.iinfo(wanted.name)
        least, most = int(limits.min), int(limits.max)
        lost = f"do not fit {wanted.name}"
    else:
        digits = 1
        while int(np.asarray(2.0**digits + 1).astype(wanted)) == 2**digits + 1:
            digits += 1
        least, most = -(2**digits), 2**digits
        lost = (
            f"are not all exact in {wanted.name}, which holds every integer up to "
            f"{most}"
        )
    given = np.iinfo(array.dtype.name)
    if (least <= given.min and given.max <= most) or not array.size:
        return None
    found = int(np.min(array)), int(np.max(array))
    if least <= found[0] and found[1] <= most:
        return None
    return f"{array.dtype.name} values from {found[0]} to {found[1]} {lost}"


def _overflow_fault(array: Array, wanted: DType) -> str | None:
    if array.dtype.itemsize <= wanted.itemsize and wanted.kind == "f":
        return None
    extremes = _finite_extremes(array)
    with np.errstate(over="ignore"):
        cast = [np.asarray(value, np.float64).astype(wanted) for value in extremes]
    if all(np.isfinite(value.astype(np.float64)) for value in cast):
        return None
    least, most = extremes
    return f"{array.dtype.name} values from {least} to {most} overflow {wanted.name}"


def _finite_extremes(array: Array) -> tuple[float, float]:
    if not array.size:
        return 0.0, 0.0
    least, most = np.fmin.reduce(array, axis=None), np.fmax.reduce(array, axis=None)
    if np.isfinite(least) and np.isfinite(most):
        return float(least), float(most)
    finite = array[np.isfinite(array)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
