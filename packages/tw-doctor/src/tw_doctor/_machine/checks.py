"""Checks of a machine: every reducer against sums by NumPy.

Gradients are small whole numbers, so that every order of addition gives the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import tensorflow as tf

import tw_reduce
from tw_core.devices import canonical_device
from tw_core.testing import SparseRows, run_in_function
from tw_reduce import Reducer
from tw_reduce.internal import ALGORITHMS, two_groups
from tw_reduce.reducers import CollectiveKeys

SIBLINGS = "tw_doctor.checks"
_SHAPES = ((), (3,), (5, 7), (4_096,), (130, 130))
_DTYPES = ("float32", "float16", "float64")
_ROWS, _TABLE = 4, (6, 2)
_RTOL = 2.0**-9  # twice that of float16


class DoesNotFit(Exception):
    """A check cannot run on these devices; the message says why."""


@dataclass(frozen=True)
class Check:
    """A property that must hold."""

    name: str
    run: Callable[[], object]  # raises AssertionError or DoesNotFit, and says why
    algorithm: str = ""  # not timed if the check fails


def reducer_checks(devices: Sequence[str]) -> Iterator[Check]:
    """Yields checks of every public reducer and combinator."""
    for name, reducer in _sums(devices).items():
        yield Check(name, partial(_check_sums, name, reducer, devices), name)
    for name, reducer in _around(devices).items():
        scale = 1 / len(devices) if name.startswith("mean") else 1.0
        run = partial(_check_sums, name, reducer, devices, scale=scale)
        yield Check(name, run)


def sibling_checks(devices: Sequence[str]) -> Iterator[Check]:
    """Yields the checks, names and functions, that installed packages declare."""
    for point in sorted(entry_points(group=SIBLINGS), key=lambda point: point.name):
        try:
            found = list(point.load()(devices))
        except Exception as error:
            found = [(f"checks of {point.name}", partial(_raise, error))]
        for name, run in found:
            yield Check(name, run)


def _raise(error: Exception) -> None:
    raise error


def algorithms_that_fit(devices: Sequence[str], failed: Sequence[str]) -> list[str]:
    """Names the algorithms that can be timed on these devices."""
    names = [name for name in ALGORITHMS if name not in failed]
    return [name for name in names if name != "sum_nccl" or not _unfit(devices)]


def _compare(what: str, got: Any, want: np.ndarray, *, num_towers: int) -> None:
    """Compares two arrays, element by element.

    A mean over ``num_towers`` is exact for a power of two; else it may differ by the
    rounding of float16.
    """
    found = np.asarray(got, np.float64)
    is_exact = num_towers & (num_towers - 1) == 0
    rtol = 0.0 if is_exact else _RTOL
    if found.shape != want.shape:
        raise AssertionError(f"{what} has shape {found.shape} instead of {want.shape}")
    wrong = ~np.isclose(found, want, rtol=rtol, atol=rtol / 128)
    if wrong.any():
        place = tuple(int(n) for n in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{what} is {found[place]:g} instead of {want[place]:g} at {list(place)}"
        )


def _sums(devices: Sequence[str]) -> dict[str, Reducer]:
    keys, groups = CollectiveKeys(), two_groups(len(devices))
    return {
        "sum_on_device": partial(tw_reduce.sum_on_device, device=devices[0]),
        "sum_balanced": partial(tw_reduce.sum_balanced, devices=devices),
        "sum_round_robin": partial(tw_reduce.sum_round_robin, devices=devices),
        "hierarchical": tw_reduce.hierarchical(groups, devices=devices),
        "sum_collective": partial(tw_reduce.sum_collective, devices=devices, keys=keys),
        "sum_nccl": partial(tw_reduce.sum_nccl, devices=devices, keys=keys),
    }


def _around(devices: Sequence[str]) -> dict[str, Reducer]:
    balanced = partial(tw_reduce.sum_balanced, devices=devices)
    packed = tw_reduce.packed(balanced)
    kinds: dict[str, Reducer] = {"sparse": balanced, "dense": packed}
    return {
        "auto": tw_reduce.auto(devices),
        "all_reduce": tw_reduce.all_reduce(devices),
        "mean(all_reduce)": tw_reduce.mean(tw_reduce.all_reduce(devices)),
        "packed(broadcast(sum_balanced))": tw_reduce.packed(
            tw_reduce.broadcast(balanced)
        ),
        "compress(sum_balanced, bfloat16)": tw_reduce.compress(balanced, tf.bfloat16),
        "accumulate_as(sum_balanced, float64)": tw_reduce.accumulate_as(
            balanced, tf.float64
        ),
        "partition(sparse, dense)": tw_reduce.partition(
            lambda info: "sparse" if info.is_sparse else "dense", kinds
        ),
    }


def _check_sums(
    name: str, reducer: Reducer, devices: Sequence[str], *, scale: float = 1.0
) -> None:
    if name == "sum_nccl" and (why := _unfit(devices)):
        raise DoesNotFit(why)
    towers = [_arrays(k) for k in range(len(devices))]

    def reduce() -> Any:
        return reducer(
            [_placed(own, d) for own, d in zip(towers, devices, strict=True)]
        )

    columns = zip(*(map(_dense, own) for own in towers), strict=True)
    want = [np.asarray(sum(column)) * scale for column in columns]
    for k, tower in enumerate(run_in_function(reduce)):
        for n, (got, wanted) in enumerate(zip(tower, want, strict=True)):
            what = f"gradient {n} of tower {k}"
            count = 1 if scale == 1 else len(devices)
            _compare(what, _dense(got), wanted, num_towers=count)


def _arrays(tower: int) -> list[Any]:
    """A tower's gradients: dense ones of several dtypes, then rows of a table."""
    random = np.random.default_rng(tower)
    dense: list[Any] = [
        np.asarray(random.integers(-4, 5, shape)).astype(dtype)
        for dtype in _DTYPES
        for shape in _SHAPES
    ]
    values = random.integers(-4, 5, (_ROWS, *_TABLE[1:])).astype(np.float32)
    indices = random.integers(0, _TABLE[0], _ROWS)
    return [*dense, SparseRows(values, indices, np.array(_TABLE, np.int32))]


def _placed(arrays: Sequence[Any], device: str) -> list[Any]:
    with tf.device(device):
        return [
            tf.IndexedSlices(*map(tf.constant, own))
            if isinstance(own, SparseRows)
            else tf.constant(own)
            for own in arrays
        ]


def _dense(array: Any) -> np.ndarray:
    whole = array.to_dense() if isinstance(array, SparseRows) else array
    return np.asarray(whole, np.float64)


def _unfit(devices: Sequence[str]) -> str:
    """Returns why NCCL does not fit; empty if it does."""
    if any("GPU" not in canonical_device(device) for device in devices):
        return "NCCL is for GPUs"
    physical = len(tf.config.get_visible_devices("GPU"))
    if physical < len(devices):
        return f"NCCL needs a GPU per tower, but there are {physical}"
    return ""
