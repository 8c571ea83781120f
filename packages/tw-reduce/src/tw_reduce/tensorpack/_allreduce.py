"""tensorpack's all-reduce functions, with the original arguments and results.

Source: tensorpack 0.11, ``tensorpack/graph_builder/utils.py``. An assert there is
a ValueError here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import tensorflow as tf

from tw_core.internal import (
    Gradients,
    check_flag,
    check_nested,
    check_weights,
    elementwise,
    read_gradients,
    read_pairs,
    tf_variable,
    without_autograph,
)
from tw_reduce._checks import (
    addable,
    check_addable,
    check_device_strings,
    check_devices,
)
from tw_reduce._combinators.mean import check_divisible, deal_out, mean
from tw_reduce._combinators.packed import packing
from tw_reduce._reducer import Reducer, Tensorlike, TowerTensors
from tw_reduce._sums.collectives import sum_collective, sum_nccl
from tw_reduce._sums.hierarchical import EIGHT_GPU_CROSS, hierarchical
from tw_reduce._sums.one_device import add_columns
from tw_reduce._sums.rendezvous import CollectiveKeys, check_keys
from tw_reduce._tensor_info import below_on


@elementwise
@without_autograph
def allreduce_grads(
    all_grads: TowerTensors,
    average: bool,
    mode: Literal["nccl", "collective"] = "nccl",
    *,
    keys: CollectiveKeys | None = None,
) -> list[list[Tensorlike]]:
    """Adds or averages the gradients across the devices that hold them.

    Args:
      all_grads: [K][N]; tower k's gradients are on its device.
      average: means instead of sums.
      mode: ``"nccl"`` or ``"collective"``.
      keys: the caller's collective keys; None makes an object for this call.

    Returns:
      [K][N], each tower's on its device; a single tower's are returned unchanged.

    Raises:
      ValueError: an unknown mode; gradients or devices that ``sum_nccl`` or
        ``sum_collective`` refuses; a tower whose gradients are on several devices.
      TypeError: something that is not a tensor; integers with ``average``.
    """
    reducers = {"nccl": sum_nccl, "collective": sum_collective}
    check_flag(average=average)
    if keys is not None:
        check_keys(keys)
    if mode not in list(reducers):
        raise ValueError(
            f"allreduce_grads: mode must be one of {sorted(reducers)}; got {mode!r}. "
            "For other algorithms use a reducer, such as sum_balanced."
        )
    all_grads = read_gradients(all_grads)
    if len(all_grads) == 1 or not all_grads[0]:
        return [list(tower) for tower in all_grads]
    reducer = partial(
        reducers[mode], devices=_own_devices(all_grads), keys=keys or CollectiveKeys()
    )
    return _averaged(reducer, average)(all_grads)


@elementwise
@without_autograph
def allreduce_grads_hierarchical(
    all_grads: TowerTensors, devices: Sequence[str], average: bool = False
) -> list[list[Tensorlike]]:
    """Adds or averages the gradients of eight towers in two groups of four.

    Args:
      all_grads: [8][N].
      devices: the eight towers' devices.
      average: means instead of sums.

    Returns:
      [8][N], each tower's on its device.

    Raises:
      ValueError: other than eight towers or devices.
      TypeError: something that is not a tensor; integers with ``average``.
    """
    check_flag(average=average)
    devices = check_device_strings(devices)
    all_grads = read_gradients(all_grads)
    if len(devices) != 8 or len(all_grads) != 8:
        raise ValueError(
            f"allreduce_grads_hierarchical: eight devices and towers are needed; got "
            f"{len(devices)} and {len(all_grads)}. For other numbers use "
            "hierarchical(groups), e.g. hierarchical([[0, 1], [2, 3]])."
        )
    reducer = hierarchical(EIGHT_GPU_CROSS, devices=devices)
    return _averaged(reducer, average)(all_grads)


@without_autograph
def allreduce_grads_naive(
    all_grads: TowerTensors,
    devices: Sequence[str] | None = None,
    average: bool = True,
) -> list[Tensorlike]:
    """Adds or averages each gradient on one device, in turn from the last gradient.

    Args:
      all_grads: [K][N].
      devices: where to add; the last gradient goes to the first device. None
        leaves it to the caller's device scope.
      average: means instead of sums.

    Returns:
      [N], one result for all towers.

    Raises:
      ValueError: a bad list of gradients; no device or an unknown one.
      TypeError: something that is not a tensor; integers with ``average``.
    """
    all_grads = addable(all_grads)
    check_flag(average=average)
    if devices is not None:
        devices = check_devices(devices)
    if len(all_grads) == 1:
        return list(all_grads[0])
    turns: Sequence[str | None] = devices or [None]
    last = len(all_grads[0]) - 1
    places = [turns[(last - n) % len(turns)] for n in range(len(all_grads[0]))]
    with tf.name_scope("allreduce_grads_naive"):
        return _averaged(partial(_sum_at, places=places), average)(all_grads)[0]


@without_autograph
def aggregate_grads_colocate(
    all_grads: Sequence[Sequence[tuple[Tensorlike, Any]]] | Gradients,
    average: bool = True,
    *,
    weights: Sequence[Any] | None = None,
) -> list[tuple[Tensorlike, Any]]:
    """Adds the towers' gradients of each variable on the variable's device.

    Args:
      all_grads: [K][N] (gradient, variable) pairs, or ``Gradients`` that were read
        with their variables; the variables are shared by the towers.
      average: means instead of sums.
      weights: [K] the towers' weights in the means, as for ``mean``.

    Returns:
      [N] (gradient, variable) pairs, with tower 0's variables. Sparse
      gradients stay sparse.

    Raises:
      ValueError: no tower, no gradient, towers of unequal length, None, differing
        dtypes or shapes, towers that do not share their variables; weights without
        ``average``.
      TypeError: something other than pairs of a gradient and its variable; dtypes that
        cannot be added; integers with ``average``; weights as for ``mean``.
    """
    check_flag(average=average)
    check_nested(all_grads=all_grads, of="(gradient, variable) pairs")
    grads = read_pairs(all_grads, variables="shared")
    check_weights(weights, num_towers=len(grads), average=average)
    check_addable(grads)
    variables = [variable for _, variable in grads.pairs[0]]
    homes = [str(tf_variable(variable).device or "") for variable in variables]
    if average:
        check_divisible(grads)
    around = partial(_averaged, average=average, weights=weights)
    return list(zip(sum_at_homes(homes, grads, around), variables, strict=True))


def sum_at_homes(
    homes: Sequence[str], grads: Gradients, around: Callable[[Reducer], Reducer]
) -> list[Tensorlike]:
    """Adds [N] gradients on variables' devices, by sums that ``around`` may divide."""
    names = {home: f"device{i}" for i, home in enumerate(dict.fromkeys(homes))}
    # A pack per tower and device is faster than sending each small gradient alone.
    reducers = {}
    for home, name in names.items():
        below = below_on([home] if home else [], None)
        reducers[name] = around(packing(partial(_sum_on, device=home or None), below))
    with tf.name_scope("aggregate_grads_colocate"):
        return deal_out([names[home] for home in homes], reducers, grads)[0]


def _averaged(
    reducer: Reducer, average: bool, weights: Sequence[Any] | None = None
) -> Reducer:
    return mean(reducer, weights=weights) if average else reducer


@elementwise
def _sum_on(grads: TowerTensors, *, device: str | None) -> list[list[Tensorlike]]:
    return _sum_at(grads, places=[device] * len(grads[0]))


def _sum_at(
    grads: TowerTensors, *, places: Sequence[str | None]
) -> list[list[Tensorlike]]:
    sums = add_columns(zip(*grads, strict=True), places)
    return [list(sums) for _ in grads]


def _own_devices(grads: TowerTensors) -> list[str]:
    by_tower = [sorted({tensor.device for tensor in tower}) for tower in grads]
    if any(len(devices) > 1 for devices in by_tower):
        raise ValueError(
            "allreduce_grads: all gradients of a tower must be on its device; got "
            f"{by_tower} (tower 0 first). Compute them under tf.device, or pass the "
            "devices to sum_collective."
        )
    return [devices[0] for devices in by_tower]
