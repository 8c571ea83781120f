"""A reducer that chooses by itself, and tells what it chose."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import tensorflow as tf

from tw_core.checks import check_function, check_whole_number
from tw_reduce._auto_plan import AutoPlan, plan_auto
from tw_reduce._checked_towers import checked_towers
from tw_reduce._combinators.combinator import Dealt
from tw_reduce._combinators.packed import DEFAULT_BELOW, packed
from tw_reduce._combinators.partition import routed
from tw_reduce._devices import check_one_device_per_tower, check_reduce_devices
from tw_reduce._reducer import (
    Reducer,
    Tensorlike,
    TowerTensors,
    check_addable,
)
from tw_reduce._sums.collective_keys import CollectiveKeys, check_keys
from tw_reduce._sums.nccl import sum_nccl
from tw_reduce._sums.sum_balanced import sum_balanced
from tw_reduce._sums.sum_on_device import sum_on_device
from tw_reduce._tensor_info import TensorInfo, describe_columns


def auto(
    devices: Sequence[str],
    *,
    below: int = DEFAULT_BELOW,
    keys: CollectiveKeys | None = None,
    explain: Callable[[AutoPlan], object] | None = None,
) -> Reducer:
    """Makes a reducer that picks an algorithm and a device for each gradient.

    Args:
      devices: [K] the towers' devices, tower 0 first.
      below: elements; dense gradients with fewer travel packed.
      keys: for NCCL; None makes an object for this reducer.
      explain: called with the plan whenever the reducer builds, e.g. ``print``.

    Returns:
      A reducer of sums, not means. Where each lies is in the plan. Sparse
      stays sparse.

    Raises:
      TypeError: ``below`` is no whole number, ``keys`` no CollectiveKeys,
        ``explain`` no function.
      ValueError: no device, or ``below`` is negative; when called, another
        number of towers than devices, and what the chosen algorithms refuse.
    """
    check_reduce_devices(devices, caller="auto")
    check_whole_number("auto", below=below, at_least=0)
    if keys is not None:
        check_keys(keys, caller="auto")
    if explain is not None:
        check_function("auto", explain=explain)
    settled = tuple(devices)
    reducers: dict[str, Reducer] = {
        "sum_on_device": partial(sum_on_device, device=settled[0]),
        "sum_balanced": partial(sum_balanced, devices=settled),
        "sum_nccl": partial(sum_nccl, devices=settled, keys=keys or CollectiveKeys()),
    }
    packing = {name: packed(own, below=below) for name, own in reducers.items()}
    make_plan = partial(plan_auto, devices=settled, below=below)
    return Dealt(packing, partial(_reduce_by_plan, make_plan, settled, explain))


def _reduce_by_plan(
    make_plan: Callable[[Sequence[TensorInfo]], AutoPlan],
    devices: Sequence[str],
    explain: Callable[[AutoPlan], object] | None,
    reducers: Mapping[str, Reducer],
    grads: TowerTensors,
) -> list[list[Tensorlike]]:
    grads = checked_towers(grads, caller="auto")
    check_addable(grads, caller="auto")
    check_one_device_per_tower(devices, len(grads), caller="auto")
    plan = make_plan(describe_columns(grads))
    if explain is not None:
        explain(plan)
    names = {choice.tensor.index: choice.algorithm for choice in plan.choices}
    with tf.name_scope("auto"):
        return routed(lambda info: names[info.index], reducers)(grads)
