"""Checks that all reducers share: of lists of gradients, their results and devices.

All errors have one form, and list every tower and position. ``caller`` is the
public function that refuses; it opens the message.
"""

from collections.abc import Callable, Sequence
from typing import cast

import tensorflow as tf

from tw_core.checks import as_user, caller, public
from tw_core.devices import check_known_devices, repeated_devices
from tw_core.gradients import values_of
from tw_reduce._reducer import (
    Reducer,
    Tensorlike,
    TowerTensors,
    columns,
    merged_shape,
    static_shape,
)

ADDABLE = (
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


@public
def check_tower_tensors(grads: TowerTensors) -> None:
    """Refuses what no reducer can add, naming every tower and position.

    Dimensions that only the run knows are not checked here; this package's reducers
    compare them in the run. Inside of a function with ``tw_core.checks.public``
    messages open with its name.

    Args:
      grads: [K][N]; what the user passed.

    Raises:
      ValueError: no tower, towers of unequal length, a gradient that is None or
        of another graph, dtypes or static shapes that differ between towers.
      TypeError: something that is neither a tensor nor an ``IndexedSlices``, or not
        a list of lists.
    """
    refuse_unaddable(grads)


def refuse_unaddable(grads: TowerTensors) -> None:
    """As ``check_tower_tensors``, which lists the errors."""
    _check_rectangular(grads)
    _check_present(grads)
    _check_kinds(grads)
    _check_graphs(grads)
    _check_alike(grads)


@public
def check_reduced(reduced: Sequence[Sequence[Tensorlike]], grads: TowerTensors) -> None:
    """Refuses the result of a reducer that changed the shape of the list.

    Inside of a ``tw_core.checks.public`` function messages open with its name.

    Args:
      reduced: what the reducer returned.
      grads: [K][N]; what it was given.

    Raises:
      ValueError: ``reduced`` is not [K][N].
      TypeError: ``grads`` is not a list of lists.
    """
    check_nested(grads)
    _check_lengths(reduced, grads)


def reduced_by(reducer: Reducer, grads: TowerTensors) -> list[list[Tensorlike]]:
    """Calls an inner reducer, and refuses a result that is not [K][N]."""
    reduced = as_user(reducer)(grads)
    _check_lengths(reduced, grads)
    return reduced


def check_addable(grads: TowerTensors, *, dtypes: Sequence[str] = ADDABLE) -> None:
    """Refuses dtypes that cannot be added, naming their positions."""
    if unfit := positions_of(grads, lambda dtype: dtype.name not in dtypes):
        raise TypeError(
            f"{caller()}: only {', '.join(dtypes)} can be added; got others at "
            f"positions {unfit}. Cast them, or leave them out."
        )


def positions_of(grads: TowerTensors, is_unfit: Callable[[tf.DType], bool]) -> str:
    """Lists the positions of some dtypes, such as ``0 (bool), 2 (string)``."""
    return ", ".join(
        f"{n} ({tensor.dtype.name})"
        for n, tensor in enumerate(grads[0])
        if is_unfit(tensor.dtype)
    )


def check_nested(grads: object, *, of: str = "tensors") -> None:
    """Refuses anything but a list with one list per tower."""
    wanted = f"{caller()}: grads must be a list with one list of {of} per tower; got"
    if not _is_list(grads):
        raise TypeError(f"{wanted} {type(grads).__name__}.")
    others = [
        f"{k} ({type(tower).__name__})"
        for k, tower in enumerate(cast("Sequence[object]", grads))
        if not _is_list(tower)
    ]
    if others:
        raise TypeError(
            f"{wanted} something else for towers {', '.join(others)}. A single tower "
            "is a list in a list."
        )


def check_devices(devices: Sequence[str], *, num_towers: int | None = None) -> None:
    """Refuses an empty list and, where devices can be known, unknown ones.

    In a graph only a session knows its devices; without a default session they
    are not checked there. With ``num_towers`` there must be that many.
    """
    check_device_strings(devices)
    check_known_devices(devices)
    if num_towers is not None and len(devices) != num_towers:
        raise ValueError(
            f"{caller()}: devices must hold one device per tower; got {len(devices)} "
            f"for {num_towers} towers. Pass the towers' devices, tower 0 first."
        )


def check_device_strings(devices: Sequence[str]) -> None:
    """Refuses an empty list, and anything but a list of strings."""
    listed = isinstance(devices, Sequence) and not isinstance(devices, str)
    if not listed or not all(isinstance(device, str) for device in devices):
        raise TypeError(
            f"{caller()}: devices must be a list of device strings; got {devices!r}. "
            "Write e.g. ['/cpu:0']."
        )
    if not devices:
        raise ValueError(f"{caller()}: devices is empty; pass e.g. ['/cpu:0'].")


def check_distinct(devices: Sequence[str]) -> None:
    """Refuses two towers on one device, for reducers in which devices communicate."""
    shared = repeated_devices(devices)
    if shared:
        raise ValueError(
            f"{caller()}: every tower needs a device of its own; several are on "
            f"{shared}. Use sum_balanced, which adds wherever the towers are."
        )


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _check_lengths(
    reduced: Sequence[Sequence[Tensorlike]], grads: TowerTensors
) -> None:
    expected = [len(tower) for tower in grads]
    try:
        got = [len(tower) for tower in reduced]
    except TypeError:
        got = None
    if got != expected:
        found = type(reduced).__name__ if got is None else f"lists of lengths {got}"
        raise ValueError(
            f"{caller()}: the reducer must return a list per tower, as long as the one "
            f"that it was given, of lengths {expected}; got {found}. A reducer is "
            "[K][N] -> [K][N] tensors."
        )


def _check_rectangular(grads: TowerTensors) -> None:
    check_nested(grads)
    if not grads:
        raise ValueError(
            f"{caller()}: grads is empty; it must hold one list of tensors per tower."
        )
    lengths = [len(tower) for tower in grads]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"{caller()}: every tower must bring the same number of gradients; got "
            f"{lengths} from towers 0..{len(grads) - 1}. A tower falls short when a "
            "variable's gradient is None: drop it, or fill it with zeros, everywhere."
        )


def _check_present(grads: TowerTensors) -> None:
    missing = {
        k: [n for n, tensor in enumerate(tower) if tensor is None]
        for k, tower in enumerate(grads)
    }
    places = [f"tower {k} at {where}" for k, where in missing.items() if where]
    if places:
        raise ValueError(
            f"{caller()}: a gradient is None for {'; '.join(places)} (positions in the "
            "tower's list). Nothing can be added to None: drop the variable from every "
            "tower, or fill it with zeros."
        )


def _check_kinds(grads: TowerTensors) -> None:
    others = [
        f"grads[{k}][{n}] is {type(tensor).__name__}"
        for k, tower in enumerate(grads)
        for n, tensor in enumerate(tower)
        if not isinstance(tensor, tf.Tensor | tf.IndexedSlices)
    ]
    if others:
        raise TypeError(
            f"{caller()}: every gradient must be a tf.Tensor or tf.IndexedSlices; "
            f"{', '.join(others)}. Convert it with tf.convert_to_tensor."
        )


def _check_graphs(grads: TowerTensors) -> None:
    here = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    if hasattr(here, "outer_graph"):  # a function captures tensors from outside
        return
    others = [
        f"grads[{k}][{n}]"
        for k, tower in enumerate(grads)
        for n, tensor in enumerate(tower)
        if getattr(values_of(tensor), "graph", None) is not here
    ]
    if others:
        raise ValueError(
            f"{caller()}: gradients must belong to the current graph, or be eager "
            f"outside of graphs; {', '.join(others)} do not. Call it where they were "
            "made."
        )


def _check_alike(grads: TowerTensors) -> None:
    problems = [
        f"position {n} has {problem}"
        for n, column in enumerate(columns(grads))
        if (problem := _difference(column))
    ]
    if problems:
        raise ValueError(
            f"{caller()}: a variable's gradients must have one dtype and one shape "
            f"over all towers; {'; '.join(problems)} (tower 0 first). Check that every "
            "tower lists its variables in the same order."
        )


def _difference(column: Sequence[Tensorlike]) -> str:
    dtypes = [tensor.dtype.name for tensor in column]
    if len(set(dtypes)) > 1:
        return f"dtypes {dtypes}"
    merged = merged_shape([static_shape(tensor) for tensor in column])
    is_sparse = any(isinstance(tensor, tf.IndexedSlices) for tensor in column)
    if merged is None or (is_sparse and merged.rank == 0):
        return f"shapes {[_described_shape(tensor) for tensor in column]}"
    return ""


def _described_shape(tensor: Tensorlike) -> str:
    if not isinstance(tensor, tf.IndexedSlices):
        return str(tensor.shape)
    return f"{tensor.shape} of rows {tensor.values.shape[1:]}"
