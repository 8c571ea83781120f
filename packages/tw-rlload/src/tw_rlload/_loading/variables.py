"""The variables that hold a batch on the devices, and the specs of its columns.

The variables are in no collection: a saver, an initialiser or a summary of "all
variables" leaves them alone. Assigning zero rows frees what they held, in a graph and
eagerly alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tw_core import Tower, map_towers
from tw_core.checks import check_list
from tw_rlload._loading.casts import DType


@dataclass(frozen=True)
class ColumnSpec:
    """What a column must look like.

    Attributes:
      name: as the user knows it.
      dtype: of the variables on the devices.
      inner_shape: of one row; None for a size that the data decides.
      is_state: whether it has one row a sequence.
    """

    name: str
    dtype: DType
    inner_shape: tuple[int | None, ...]
    is_state: bool


WEIGHTS = ColumnSpec("weights", np.dtype(np.float32), (), is_state=False)

DataVariables: TypeAlias = "list[list[list[tf.Variable]]]"
"""[buffers][K][C]"""


def make_spec(
    name: str, dtype: Any, shape: Any, *, is_state: bool, caller: str
) -> ColumnSpec:
    """Makes the spec of a placeholder or a ``tf.TensorSpec``.

    Raises:
      ValueError: strings, resources and the like; a shape of unknown rank, or
        of rank 0, which has no rows.
    """
    shape, tf_dtype = tf.TensorShape(shape), tf.as_dtype(dtype).base_dtype
    if not (tf_dtype.is_floating or tf_dtype.is_integer or tf_dtype.is_bool):
        raise ValueError(
            f"{caller}: column {name!r} has dtype {tf_dtype.name}; only floats, "
            "integers and bools can be loaded. Encode it as numbers."
        )
    if not shape.rank:
        raise ValueError(
            f"{caller}: column {name!r} has shape {shape}; rows are cut along axis 0, "
            "so the rank must be known and at least 1, as in [None, 17]."
        )
    np_dtype = np.dtype(tf_dtype.as_numpy_dtype)
    return ColumnSpec(name, np_dtype, tuple(shape.as_list()[1:]), is_state)


def specs_of_placeholders(
    inputs: Sequence[tf.Tensor], states: Sequence[tf.Tensor], *, caller: str
) -> tuple[ColumnSpec, ...]:
    """Returns the specs of placeholders, states last.

    Raises:
      TypeError: arguments that are not lists of symbolic tensors.
      ValueError: no input, a placeholder given twice or of another graph; see
        ``make_spec``.
    """
    for name, given in (("input_placeholders", inputs), ("rnn_inputs", states)):
        check_list(caller, empty=True, of="placeholders", **{name: given})
        _check_placeholders(given, name, caller)
    if not inputs:
        raise ValueError(f"{caller}: input_placeholders is empty; pass at least one.")
    names = [tensor.op.name for tensor in (*inputs, *states)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{caller}: columns need names of their own; twice: {twice}.")
    return tuple(
        make_spec(t.op.name, t.dtype, t.shape, is_state=is_state, caller=caller)
        for is_state, tensors in ((False, inputs), (True, states))
        for t in tensors
    )


def specs_of_mappings(
    columns: Mapping[str, tf.TensorSpec],
    states: Mapping[str, tf.TensorSpec],
    *,
    caller: str,
) -> tuple[ColumnSpec, ...]:
    """Returns the specs of named ``tf.TensorSpec``, states last.

    Raises:
      TypeError: arguments that are not dictionaries of ``tf.TensorSpec`` by name.
      ValueError: no column, a name that is both's; see ``make_spec``.
    """
    _check_specs(columns, "columns", caller)
    _check_specs(states, "states", caller)
    if not columns or columns.keys() & states.keys():
        raise ValueError(
            f"{caller}: pass at least one column, and names that are either a "
            f"column's or a state's; got columns {sorted(columns)} and states "
            f"{sorted(states)}."
        )
    return tuple(
        make_spec(name, spec.dtype, spec.shape, is_state=is_state, caller=caller)
        for is_state, specs in ((False, columns), (True, states))
        for name, spec in specs.items()
    )


def make_data_variables(
    towers: Sequence[Tower], specs: Sequence[ColumnSpec], num_buffers: int
) -> DataVariables:
    """Makes a variable per buffer, tower and column, on the tower's device.

    Args:
      towers: K towers.
      specs: C columns.
      num_buffers: how many batches are held.

    Returns:
      Variables of no rows yet (in a graph: uninitialised), in no collection and
      not trainable.
    """
    return [
        map_towers(lambda _: [_variable(spec) for spec in specs], towers)
        for _ in range(num_buffers)
    ]


def no_rows(variable: tf.Variable) -> tf.Tensor:
    """Returns the value that frees what a data variable holds."""
    return tf.zeros(_without_rows(variable.shape.as_list()[1:]), variable.dtype)


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


def _check_placeholders(given: Sequence[Any], name: str, caller: str) -> None:
    others = [type(one).__name__ for one in given if not tf.is_symbolic_tensor(one)]
    if others:
        raise TypeError(
            f"{caller}: {name} must hold placeholders, or other tensors of the graph; "
            f"got {others}. Arrays are for load_data."
        )
    graph = tf.compat.v1.get_default_graph()
    foreign = [tensor.name for tensor in given if tensor.graph is not graph]
    if foreign:
        raise ValueError(
            f"{caller}: {name} must be of the default graph; got tensors of another: "
            f"{foreign}."
        )


def _check_specs(given: Mapping[str, tf.TensorSpec], what: str, caller: str) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{caller}: {what} must be a dictionary of tf.TensorSpec by name; got "
            f"{given!r:.80} ({type(given).__name__})."
        )
    others = {
        name: type(spec).__name__
        for name, spec in given.items()
        if not (isinstance(name, str) and isinstance(spec, tf.TensorSpec))
    }
    if others:
        raise TypeError(
            f"{caller}: {what} must map names to tf.TensorSpec; got {others}. Write "
            "e.g. {'x': tf.TensorSpec([None, 17])}."
        )
