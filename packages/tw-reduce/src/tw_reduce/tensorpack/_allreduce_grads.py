"""tensorpack's all-reduce functions, with their arguments and results.

Source: tensorpack 0.11, ``tensorpack/graph_builder/utils.py``. What was an
assert there is a ValueError here.
"""

from collections.abc import Sequence
from functools import partial

import tensorflow as tf

from tw_core import without_autograph
from tw_core.checks import check_flag
from tw_reduce._checked_towers import checked_towers
from tw_reduce._combinators.mean import mean
from tw_reduce._devices import check_device_strings, check_reduce_devices
from tw_reduce._reducer import (
    Reducer,
    Tensorlike,
    TowerTensors,
    check_addable,
    columns,
    dense_part,
)
from tw_reduce._sums.add_n import add_columns
from tw_reduce._sums.collective import sum_collective
from tw_reduce._sums.collective_keys import CollectiveKeys, check_keys
from tw_reduce._sums.hierarchical import EIGHT_GPU_CROSS, hierarchical
from tw_reduce._sums.nccl import sum_nccl


@without_autograph
def allreduce_grads(
    all_grads: TowerTensors,
    average: bool,
    mode: str = "nccl",
    *,
    keys: CollectiveKeys | None = None,
) -> list[list[Tensorlike]]:
    """Adds or averages the gradients between the devices that they lie on.

    Args:
      all_grads: [K][N]; tower k's gradients lie on its device.
      average: means instead of sums.
      mode: ``"nccl"`` or ``"collective"``.
      keys: the caller's collective keys; None makes an object for this call.

    Returns:
      [K][N], each tower's on its device; one tower is returned as it is.

    Raises:
      ValueError: another mode; what ``sum_nccl`` or ``sum_collective`` refuse;
        a tower whose gradients lie on several devices.
      TypeError: something that is no tensor; integers with ``average``.
    """
    reducers = {"nccl": sum_nccl, "collective": sum_collective}
    check_flag("allreduce_grads", average=average)
    if keys is not None:
        check_keys(keys, caller="allreduce_grads")
    if mode not in list(reducers):
        raise ValueError(
            f"allreduce_grads: mode must be one of {sorted(reducers)}; got {mode!r}. "
            "For other ways take a reducer, such as sum_balanced."
        )
    all_grads = checked_towers(all_grads, caller="allreduce_grads")
    if len(all_grads) == 1 or not all_grads[0]:
        return [list(tower) for tower in all_grads]
    reducer = partial(
        reducers[mode], devices=_own_devices(all_grads), keys=keys or CollectiveKeys()
    )
    return _averaged(reducer, average)(all_grads)


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
      TypeError: something that is no tensor; integers with ``average``.
    """
    check_flag("allreduce_grads_hierarchical", average=average)
    check_device_strings(devices, caller="allreduce_grads_hierarchical")
    all_grads = checked_towers(all_grads, caller="allreduce_grads_hierarchical")
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
    """Adds or averages each gradient on one device, taken in turn from the last.

    Args:
      all_grads: [K][N].
      devices: where to add; the last gradient goes to the first device. None
        leaves it to the caller's device scope.
      average: means instead of sums.

    Returns:
      [N], one result for all towers.

    Raises:
      ValueError: a bad list of gradients; no device or an unknown one.
      TypeError: something that is no tensor; integers with ``average``.
    """
    all_grads = checked_towers(all_grads, caller="allreduce_grads_naive")
    check_addable(all_grads, caller="allreduce_grads_naive")
    check_flag("allreduce_grads_naive", average=average)
    if devices is not None:
        check_reduce_devices(devices, caller="allreduce_grads_naive")
    if len(all_grads) == 1:
        return list(all_grads[0])
    reducer = _averaged(partial(_sum_from_last, devices=devices), average)
    with tf.name_scope("allreduce_grads_naive"):
        return reducer(all_grads)[0]


def _averaged(reducer: Reducer, average: bool) -> Reducer:
    return mean(reducer) if average else reducer


def _sum_from_last(
    grads: TowerTensors, *, devices: Sequence[str] | None
) -> list[list[Tensorlike]]:
    turns: Sequence[str | None] = devices or [None]
    count = len(grads[0])
    places = [turns[(count - 1 - n) % len(turns)] for n in range(count)]
    sums = add_columns(columns(grads), places)
    return [list(sums) for _ in grads]


def _own_devices(grads: TowerTensors) -> list[str]:
    by_tower = [
        sorted({dense_part(tensor).device for tensor in tower}) for tower in grads
    ]
    if any(len(devices) > 1 for devices in by_tower):
        raise ValueError(
            "allreduce_grads: all gradients of a tower must lie on its device; got "
            f"{by_tower} (tower 0 first). Compute them under tf.device, or pass the "
            "devices to sum_collective."
        )
    return [devices[0] for devices in by_tower]
