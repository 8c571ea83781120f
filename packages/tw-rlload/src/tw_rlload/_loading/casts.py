"""Which casts would change values: found before anything is copied.

A float may lose digits (float64 to float32), as feeding always allowed; it may
not become an integer, nor leave the range. An integer must be met exactly.
"""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
DType = np.dtype[np.generic]


def cast_fault(array: Array, wanted: DType) -> str | None:
    """Says what the cast of ``array`` to ``wanted`` would lose.

    Args:
      array: any shape; its values are read only where its dtype does not
        settle the question.
      wanted: dtype of the column.

    Returns:
      None where nothing is lost, else what, with the extreme values.
    """
    given = array.dtype
    kinds = (_kind(given), _kind(wanted))
    if given == wanted or (kinds[0] == "bool" and kinds[1] in ("int", "float")):
        return None
    if kinds == ("int", "int"):
        return _integer_fault(array, wanted)
    if kinds == ("int", "float"):
        return _exactness_fault(array, wanted)
    if kinds == ("float", "float"):
        return _overflow_fault(array, wanted)
    if np.can_cast(given, wanted, "safe"):
        return None
    return f"{given.name} does not become {wanted.name} without loss"


def _kind(dtype: DType) -> str:
    if dtype.kind in "iu":
        return "int"
    # bfloat16 and the like come from ml_dtypes, where their kind says nothing.
    if dtype.kind == "f" or "float" in dtype.name:
        return "float"
    return "bool" if dtype.kind == "b" else dtype.kind


def _integer_fault(array: Array, wanted: DType) -> str | None:
    if np.can_cast(array.dtype, wanted, "safe") or not array.size:
        return None
    info = np.iinfo(wanted.name)
    least, most = int(np.min(array)), int(np.max(array))
    if info.min <= least and most <= info.max:
        return None
    return f"{array.dtype.name} values from {least} to {most} do not fit {wanted.name}"


def _exactness_fault(array: Array, wanted: DType) -> str | None:
    exact = 2 ** _digits(wanted)
    if 2 ** (8 * array.dtype.itemsize) <= exact or not array.size:
        return None
    least, most = int(np.min(array)), int(np.max(array))
    if -exact <= least and most <= exact:
        return None
    return (
        f"{array.dtype.name} values from {least} to {most} are not all exact in "
        f"{wanted.name}, which holds every integer up to {exact}"
    )


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


def _digits(dtype: DType) -> int:
    """Returns n such that every integer up to 2**n is exact in a float dtype."""
    digits = 1
    while int(np.asarray(2.0**digits + 1).astype(dtype)) == 2**digits + 1:
        digits += 1
    return digits


def _finite_extremes(array: Array) -> tuple[float, float]:
    if not array.size:
        return 0.0, 0.0
    least, most = np.fmin.reduce(array, axis=None), np.fmax.reduce(array, axis=None)
    if np.isfinite(least) and np.isfinite(most):
        return float(least), float(most)
    finite = array[np.isfinite(array)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
