"""The variables that hold a batch on the devices, and filling them.

They are in no collection: a saver, an initialiser or a summary of "all
variables" leaves them alone. Assigning zero rows frees what they held, in a
graph and outside of one alike.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tw_core import Tower, check_devices, map_towers
from tw_rlload._loading.casts import Array
from tw_rlload._loading.specs import ColumnSpec
from tw_rlload._session.calls import SessionCalls

# [stacks][K][C]
DataVariables: TypeAlias = "list[list[list[tf.Variable]]]"


def make_data_variables(
    towers: Sequence[Tower], specs: Sequence[ColumnSpec], stacks: int
) -> DataVariables:
    """Makes a variable a stack, tower and column, on the tower's device.

    Args:
      towers: K towers.
      specs: C columns.
      stacks: how many batches are held.

    Returns:
      [stacks][K][C] variables of no rows yet (in a graph: uninitialised), in no
      collection and not trainable.
    """

    def make(tower: Tower) -> list[tf.Variable]:
        del tower  # Its scope is in force already.
        return [_variable(spec) for spec in specs]

    return [map_towers(make, towers) for _ in range(stacks)]


class SessionWriter:
    """Fills variables through a session; ``bind`` it to one."""

    def __init__(self, towers: Sequence[Tower], variables: DataVariables) -> None:
        """Builds the operations that free and fill each variable.

        Args:
          towers: K towers.
          variables: [stacks][K][C].
        """
        self._devices = [tower.device for tower in towers]
        self._checked: Any = None
        with tf.device("/cpu:0"), tf.name_scope("load"):
            self._rows = [
                tf.compat.v1.placeholder(v.dtype, v.shape) for v in variables[0][0]
            ]
        self._assigns: list[Any] = []
        self._empties: list[Any] = []
        for stack in variables:
            self._assigns.append(map_towers(self._assign_each, towers, stack))
            self._empties.append(tf.group(*map_towers(_empty_each, towers, stack)))

    def bind(self, sess: Any, calls: SessionCalls, *, caller: str) -> "BoundWriter":
        """Returns the writer for ``sess``.

        Raises:
          TypeError, ValueError: it is no session of the graph, or lacks a device;
            the last is told for plain sessions.
        """
        calls.check_session(sess, caller=caller)
        if isinstance(sess, tf.compat.v1.Session) and sess is not self._checked:
            check_devices(self._devices, caller=caller, session=sess)
            self._checked = sess
        return BoundWriter(sess, calls, self._rows, self._assigns, self._empties)

    def _assign_each(self, tower: Tower, column: list[tf.Variable]) -> list[Any]:
        del tower
        pairs = zip(column, self._rows, strict=True)
        return [variable.assign(rows, read_value=False) for variable, rows in pairs]


class BoundWriter:
    """Fills variables through one session."""

    def __init__(
        self,
        sess: Any,
        calls: SessionCalls,
        rows: list[tf.Tensor],
        assigns: list[Any],
        empties: list[Any],
    ) -> None:
        """Takes a session and the operations of ``SessionWriter``."""
        self._sess, self._calls = sess, calls
        self._rows, self._assigns, self._empties = rows, assigns, empties

    def empty(self, stack: int) -> None:
        """Frees the rows of a stack on all devices."""
        self._run(("empty", stack), self._empties[stack], {})

    def write(self, stack: int, tower: int, column: int, rows: Array) -> None:
        """Assigns ``rows``, which a CPU device takes over as they lie."""
        assign = self._assigns[stack][tower][column]
        self._run(("write", stack, tower, column), assign, {self._rows[column]: rows})

    def _run(self, key: Any, operation: Any, feeds: dict[Any, Any]) -> None:
        self._calls.run(self._sess, key, operation, feeds)


class EagerWriter:
    """Fills variables outside of graphs."""

    def __init__(self, variables: DataVariables) -> None:
        """Takes [stacks][K][C] variables."""
        self._variables = variables

    def empty(self, stack: int) -> None:
        """Frees the rows of a stack on all devices."""
        for column in self._variables[stack]:
            for variable in column:
                _assign_on_device(variable, _no_rows(variable))

    def write(self, stack: int, tower: int, column: int, rows: Array) -> None:
        """Assigns ``rows``, which a CPU device takes over as they lie."""
        variable = self._variables[stack][tower][column]
        _assign_on_device(variable, lambda: _adopt(rows))


def _variable(spec: ColumnSpec) -> tf.Variable:
    shape = tf.TensorShape([None, *spec.inner_shape])
    none = [0, *(size or 0 for size in spec.inner_shape)]
    return tf.compat.v1.Variable(
        lambda: tf.zeros(none, spec.dtype),
        trainable=False,
        collections=[],
        use_resource=True,
        dtype=spec.dtype,
        shape=shape,
        name=f"loaded/{spec.name}",
    )


def _no_rows(variable: tf.Variable) -> Callable[[], tf.Tensor]:
    sizes = [0, *(size or 0 for size in variable.shape.as_list()[1:])]
    return lambda: tf.zeros(sizes, variable.dtype)


def _empty_each(tower: Tower, column: list[tf.Variable]) -> tf.Operation:
    del tower
    return tf.group(*(v.assign(_no_rows(v)(), read_value=False) for v in column))


def _assign_on_device(variable: tf.Variable, value: Callable[[], tf.Tensor]) -> None:
    with tf.device(variable.device):
        variable.assign(value(), read_value=False)


def _adopt(rows: Any) -> tf.Tensor:
    # tf.convert_to_tensor copies, into memory that is new each time. DLPack hands
    # the array over; it has no word for bools and the floats of ml_dtypes.
    if rows.dtype.kind in "iuf" and rows.size:
        with tf.device("/cpu:0"):
            return tf.experimental.dlpack.from_dlpack(rows.__dlpack__())
    return tf.convert_to_tensor(np.asarray(rows))
