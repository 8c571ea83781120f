"""Checks that all reducers share: of lists of gradients, their results and devices.

All errors have the same form, and list every tower and position.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tw_core.internal import (
    DEVICES,
    Gradients,
    check_function,
    check_gradients,
    check_known_devices,
    check_list,
    device_name,
    read_gradients,
    repeated_devices,
)
from tw_reduce._reducer import Reducer, TowerTensors, is_stateful

_F = TypeVar("_F", bound=Callable[..., Any])

ADDABLE = (
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


def check_tower_tensors(grads: TowerTensors) -> None:
    """Refuses gradients that no reducer can add, naming every tower and position.

    Dimensions that are known only at run time are not checked here; this package's
    reducers compare them then.

    Args:
      grads: [K][N]; the user's argument.

    Raises:
      ValueError: no tower, towers of unequal length, a gradient that is None or
        of another graph, dtypes or static shapes that differ between towers.
      TypeError: something that is neither a tensor nor an ``IndexedSlices``, or not
        a list of lists.
    """
    check_gradients(grads)


def check_adds(**argument: Any) -> Reducer:
    """Refuses anything but a reducer that adds, for code that divides its sums.

    Args:
      **argument: the one argument to check, as ``name=value``.

    Returns:
      The reducer, which may be one with memory (``StatefulReducer``).

    Raises:
      TypeError: it is neither a function nor a reducer with memory.
      ValueError: it averages: its means would be divided again.
    """
    ((name, reducer),) = argument.items()
    if is_stateful(reducer):
        return reducer  # type: ignore[no-any-return]
    check_reducer(**argument)
    if getattr(reducer, "averages", False):
        raise ValueError(
            f"{name} averages already, and its means would be divided again; pass the "
            "reducer without tw_reduce.mean."
        )
    return reducer  # type: ignore[no-any-return]


def check_reducer(**argument: Any) -> Any:
    """Refuses anything that is not a function, and compressors of this package."""
    ((name, reducer),) = argument.items()
    if compressor := compressor_name(reducer):
        raise TypeError(
            f"{name} must reduce the gradients of all towers; {compressor} compresses "
            "one tensor. Make a reducer of it: "
            f"tw_reduce.compression.error_feedback({compressor})."
        )
    return check_function(**argument)


def named_compressor(compressor: _F, name: str) -> _F:
    """Names a compressor, or the function that makes it, for messages."""
    compressor._tw_compressor = name  # type: ignore[attr-defined]
    return compressor


def compressor_name(function: Any) -> str | None:
    """Returns what ``named_compressor`` named a function; None for any other."""
    return getattr(function, "_tw_compressor", None)


def addable(grads: TowerTensors) -> Gradients:
    """Reads gradients; also refuses dtypes that cannot be added."""
    read = read_gradients(grads)
    check_addable(read)
    return read


def check_addable(grads: TowerTensors, *, dtypes: Sequence[str] = ADDABLE) -> None:
    """Refuses dtypes that cannot be added, naming their positions."""
    if unfit := positions_of(grads, lambda dtype: dtype.name not in dtypes):
        raise TypeError(
            f"Only {', '.join(dtypes)} can be added; got others at positions {unfit}. "
            "Cast them, or leave them out."
        )


def positions_of(grads: TowerTensors, is_unfit: Callable[[tf.DType], bool]) -> str:
    """Lists the positions of some dtypes, such as ``0 (bool), 2 (string)``."""
    return ", ".join(
        f"{n} ({tensor.dtype.name})"
        for n, tensor in enumerate(grads[0])
        if is_unfit(tensor.dtype)
    )


def check_items(kind: type, of: str, wanted: str, **argument: Any) -> None:
    """Refuses a list that holds anything else, naming every position."""
    (name,) = argument
    others = [
        f"{n} ({type(item).__name__})"
        for n, item in enumerate(check_list(**argument, of=of, empty=True))
        if not isinstance(item, kind)
    ]
    if others:
        raise TypeError(
            f"{name} must {wanted}; got others at positions {', '.join(others)}."
        )


def check_devices(
    devices: Sequence[Any], *, num_towers: int | None = None
) -> list[str]:
    """Names devices; refuses an empty list and, where they can be known, unknown ones.

    In a graph only a session knows its devices; without a default session they
    are not checked there. With ``num_towers`` there must be that many.
    """
    names = check_device_strings(devices)
    check_known_devices(names)
    if num_towers is not None and len(devices) != num_towers:
        raise ValueError(
            f"devices must hold one device per tower; got {len(devices)} for "
            f"{num_towers} towers. Pass the towers' devices, tower 0 first."
        )
    return names


def check_device_strings(devices: Sequence[Any]) -> list[str]:
    """Names devices; refuses an empty list, and anything but a list of devices."""
    listed = isinstance(devices, Sequence) and not isinstance(devices, str)
    if not listed or not all(isinstance(own, (str, *DEVICES)) for own in devices):
        raise TypeError(
            f"devices must be a list of device strings; got {devices!r}. Write e.g. "
            "['/cpu:0']."
        )
    if not devices:
        raise ValueError("devices is empty; pass e.g. ['/cpu:0'].")
    return list(map(device_name, devices))


def check_distinct(devices: Sequence[str]) -> None:
    """Refuses two towers on one device, for reducers in which devices communicate."""
    shared = repeated_devices(devices)
    if shared:
        raise ValueError(
            f"Every tower needs a device of its own; several are on {shared}. Use "
            "sum_balanced, which adds wherever the towers are."
        )
