"""What a reducer takes and gives: K lists of N tensors, and what is refused.

A reducer is any callable ``[K][N] -> [K][N]``. All of them check their input
here, so that each problem is told in one way, with every tower and position.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, cast

import tensorflow as tf

from tw_core.checks import check_text

Tensorlike: TypeAlias = tf.Tensor | tf.IndexedSlices
"""A dense or a sparse gradient; None is refused before any algorithm."""

TowerTensors: TypeAlias = Sequence[Sequence[Tensorlike]]
"""[K][N]: tower k's tensor for variable n."""

Reducer: TypeAlias = Callable[[TowerTensors], list[list[Tensorlike]]]
"""Gives every tower the sum (or what else it says) over all towers."""

HALF_DTYPES = (tf.float16, tf.bfloat16)
ADDABLE = (
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


def check_tower_tensors(grads: TowerTensors, *, caller: str) -> None:
    """Refuses what no reducer can add, naming every tower and position.

    Args:
      grads: [K][N]; what the user passed.
      caller: who refuses; opens the message.

    Raises:
      ValueError: no tower, towers of unequal length, a gradient that is None or
        of another graph, dtypes or static shapes that differ between towers.
      TypeError: something that is neither tensor nor ``IndexedSlices``, or no
        list of lists.
    """
    check_text("check_tower_tensors", caller=caller)
    _check_rectangular(grads, caller)
    _check_present(grads, caller)
    _check_kinds(grads, caller)
    _check_graphs(grads, caller)
    _check_alike(grads, caller)


def check_reduced(
    reduced: Sequence[Sequence[Tensorlike]], grads: TowerTensors, *, caller: str
) -> None:
    """Refuses the result of a reducer that changed the shape of the list.

    Args:
      reduced: what the reducer returned.
      grads: [K][N]; what it was given.
      caller: who refuses; opens the message.

    Raises:
      ValueError: ``reduced`` is not [K][N].
      TypeError: ``grads`` is no list of lists.
    """
    check_text("check_reduced", caller=caller)
    check_nested(grads, f"{caller} (check_reduced)")
    want = [len(tower) for tower in grads]
    try:
        got = [len(tower) for tower in reduced]
    except TypeError:
        got = None
    if got != want:
        came = type(reduced).__name__ if got is None else f"lists of lengths {got}"
        raise ValueError(
            f"{caller}: the reducer must return one list a tower, as long as it came, "
            f"of lengths {want}; got {came}. A reducer is [K][N] -> [K][N] tensors."
        )


def check_addable(
    grads: TowerTensors, *, caller: str, dtypes: Sequence[str] = ADDABLE
) -> None:
    """Refuses dtypes that cannot be added, naming their positions.

    Args:
      grads: [K][N], checked.
      caller: who refuses; opens the message.
      dtypes: names of those that can.

    Raises:
      TypeError: another dtype.
    """
    unfit = [
        f"{n} ({tensor.dtype.name})"
        for n, tensor in enumerate(grads[0])
        if tensor.dtype.name not in dtypes
    ]
    if unfit:
        raise TypeError(
            f"{caller}: it adds {', '.join(dtypes)}; got others at positions "
            f"{', '.join(unfit)}. Cast them, or leave them out."
        )


def columns(grads: TowerTensors) -> list[tuple[Tensorlike, ...]]:
    """Turns [K][N] into [N][K]: the towers' tensors for each variable."""
    return list(zip(*grads, strict=True))


def rows(
    columns: Sequence[Sequence[Tensorlike]], num_towers: int
) -> list[list[Tensorlike]]:
    """Turns [N][K] back into [K][N], also where N is 0."""
    return [[column[k] for column in columns] for k in range(num_towers)]


def dense_part(tensor: Tensorlike) -> tf.Tensor:
    """Gives the tensor itself, or the values of an ``IndexedSlices``."""
    return tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor


def map_dense(fn: Callable[[tf.Tensor], tf.Tensor], tensor: Tensorlike) -> Tensorlike:
    """Changes a dense tensor, or the values of an ``IndexedSlices``, where it lies."""
    dense = dense_part(tensor)
    with tf.device(dense.device):
        changed = fn(dense)
    if not isinstance(tensor, tf.IndexedSlices):
        return changed
    return tf.IndexedSlices(changed, tensor.indices, tensor.dense_shape)


def check_nested(grads: object, caller: str, *, of: str = "tensors") -> None:
    """Refuses what is no list with a list per tower."""
    wanted = f"{caller}: grads must be a list with one list of {of} per tower; got"
    if not _is_list(grads):
        raise TypeError(f"{wanted} {type(grads).__name__}.")
    others = [
        f"{k} ({type(tower).__name__})"
        for k, tower in enumerate(cast("Sequence[object]", grads))
        if not _is_list(tower)
    ]
    if others:
        raise TypeError(
            f"{wanted} something else for towers {', '.join(others)}. One tower is a "
            "list in a list."
        )


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _check_rectangular(grads: TowerTensors, caller: str) -> None:
    check_nested(grads, caller)
    if not grads:
        raise ValueError(
            f"{caller}: grads is empty; it must hold one list of tensors a tower."
        )
    lengths = [len(tower) for tower in grads]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"{caller}: every tower must bring the same number of gradients; got "
            f"{lengths} from towers 0..{len(grads) - 1}. A tower falls short when a "
            "variable's gradient is None: drop it, or fill it with zeros, everywhere."
        )


def _check_present(grads: TowerTensors, caller: str) -> None:
    missing = {
        k: [n for n, tensor in enumerate(tower) if tensor is None]
        for k, tower in enumerate(grads)
    }
    places = [f"tower {k} at {where}" for k, where in missing.items() if where]
    if places:
        raise ValueError(
            f"{caller}: a gradient is None for {'; '.join(places)} (positions in the "
            "tower's list). Nothing can be added to None: drop the variable from every "
            "tower, or fill it with zeros."
        )


def _check_kinds(grads: TowerTensors, caller: str) -> None:
    strangers = [
        f"grads[{k}][{n}] is {type(tensor).__name__}"
        for k, tower in enumerate(grads)
        for n, tensor in enumerate(tower)
        if not isinstance(tensor, tf.Tensor | tf.IndexedSlices)
    ]
    if strangers:
        raise TypeError(
            f"{caller}: every gradient must be a tf.Tensor or tf.IndexedSlices; "
            f"{', '.join(strangers)}. Convert it with tf.convert_to_tensor."
        )


def static_shape(tensor: Tensorlike) -> tf.TensorShape | None:
    """Gives the shape of the dense array, as far as it is known while building.

    Returns:
      Of an ``IndexedSlices`` what its rows and its ``dense_shape`` tell; None if
      they contradict each other.
    """
    if not isinstance(tensor, tf.IndexedSlices):
        return tensor.shape
    rows = tf.TensorShape([None]).concatenate(tensor.values.shape[1:])
    return merged_shape([tensor.shape, rows])


def merged_shape(shapes: Sequence[tf.TensorShape | None]) -> tf.TensorShape | None:
    """Puts together what several shapes know of one; None if they contradict."""
    merged = tf.TensorShape(None)
    for shape in shapes:
        if shape is None or not merged.is_compatible_with(shape):
            return None
        merged = merged.merge_with(shape)
    return merged


def _check_graphs(grads: TowerTensors, caller: str) -> None:
    here = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    if hasattr(here, "outer_graph"):  # a function takes tensors from around it
        return
    strangers = [
        f"grads[{k}][{n}]"
        for k, tower in enumerate(grads)
        for n, tensor in enumerate(tower)
        if getattr(dense_part(tensor), "graph", None) is not here
    ]
    if strangers:
        raise ValueError(
            f"{caller}: gradients must be of the graph in force, or eager where none "
            f"is; {', '.join(strangers)} are not. Call it where they were made."
        )


def _check_alike(grads: TowerTensors, caller: str) -> None:
    problems = [
        f"position {n} has {problem}"
        for n, column in enumerate(columns(grads))
        for problem in _differences(column)
    ]
    if problems:
        raise ValueError(
            f"{caller}: a variable's gradients must have one dtype and one shape over "
            f"all towers; {'; '.join(problems)} (tower 0 first). Check that every "
            "tower lists its variables in the same order."
        )


def _differences(column: Sequence[Tensorlike]) -> Iterator[str]:
    dtypes = [tensor.dtype.name for tensor in column]
    if len(set(dtypes)) > 1:
        yield f"dtypes {dtypes}"
        return
    shapes = [static_shape(tensor) for tensor in column]
    merged = merged_shape(shapes)
    is_sparse = any(isinstance(tensor, tf.IndexedSlices) for tensor in column)
    if merged is None or (is_sparse and merged.rank == 0):
        yield f"shapes {[_told(tensor) for tensor in column]}"


def _told(tensor: Tensorlike) -> str:
    if not isinstance(tensor, tf.IndexedSlices):
        return str(tensor.shape)
    return f"{tensor.shape} of rows {tensor.values.shape[1:]}"
