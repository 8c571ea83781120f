"""Stand-ins for variables that towers share, and copies that stay equal.

Tower 0 alone writes a shared variable, for all towers. The others write to stand-ins,
which start from its value at the last meeting: so each tower sees its own writes since
then.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from tw_core._tf_compat import (
    outermost_function_graph,
    spec_of_handle,
    unnoticed_variable,
)

Settle = Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor]], Sequence[tf.Tensor]]
_kept: WeakKeyDictionary[tf.Graph, list[tf.Variable]] = WeakKeyDictionary()


@dataclass
class StandIns:
    """The stand-ins of one step's towers, by tower and variable."""

    _made: dict[tuple[int, int], tf.Variable] = field(default_factory=dict)

    def of(
        self, tower: int, handles: Sequence[Any], values: Sequence[tf.Tensor]
    ) -> list[Any]:
        """Returns [N] handles that a tower writes instead, with the values assigned."""
        found = []
        for handle, value in zip(handles, values, strict=True):
            key = tower, id(handle)
            if key not in self._made:
                self._made[key] = _stand_in(handle)
            found.append(self._made[key].handle)
            write(found[-1], value)
        return found


def make_equal(
    names: Sequence[str], towers: Sequence[Mapping[str, Any]], settle: Settle | None
) -> None:
    """Gives all towers the values that the first one has assigned.

    ``towers`` are [K] handles by the tensors' names; ``settle`` is ``call_once``'s.
    """
    if len(towers) == 1 and settle is None:
        return
    first, *others = ([own[name] for name in names] for own in towers)
    values: Sequence[tf.Tensor] = [read(handle) for handle in first]
    if settle is not None:
        values = settle(first, values)
        others.append(first)
    for own in others:
        for handle, main, value in zip(own, first, values, strict=True):
            if handle is not main or own is first:
                write(handle, value)


def read(handle: Any) -> tf.Tensor:
    """Reads a variable where it is."""
    _, dtype = spec_of_handle(handle)
    with tf.device(handle.device), tf.name_scope("sync_variables"):  # for timelines
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)


def write(handle: Any, value: tf.Tensor) -> None:
    """Assigns to a variable where it is."""
    with tf.device(handle.device):
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def _stand_in(handle: Any) -> tf.Variable:
    """Makes a variable like that of a handle, which lives as long as the function."""
    shape, dtype = spec_of_handle(handle)
    sizes = [] if shape.rank is None else [size or 0 for size in shape]
    with tf.init_scope(), tf.device(handle.device):
        made = unnoticed_variable(tf.zeros(sizes, dtype), shape)
    _kept.setdefault(outermost_function_graph(), []).append(made)
    return made
