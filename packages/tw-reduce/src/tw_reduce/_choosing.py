"""Choosing a reducer: for each gradient by a plan, or by an older mode name.

Source of the mode names: tensorpack 0.11, ``SyncMultiGPUReplicatedBuilder``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import tensorflow as tf

from tw_core.devices import canonical_device
from tw_core.internal import Gradients, check_function
from tw_reduce._checks import check_addable, check_devices
from tw_reduce._combinators.mean import Dealer, deal_out
from tw_reduce._combinators.packed import check_below_bytes, packed, packing
from tw_reduce._measured import (
    COPIED,
    KEPT,
    Measured,
    Measurements,
    as_measurements,
    check_made_for,
    described_here,
)
from tw_reduce._planning import AutoPlan, make_plan
from tw_reduce._reducer import Reducer, Tensorlike
from tw_reduce._sums.collectives import (
    check_one_gpu_per_tower,
    sum_collective,
    sum_nccl,
)
from tw_reduce._sums.hierarchical import EIGHT_GPU_CROSS, Groups, hierarchical
from tw_reduce._sums.one_device import (
    add_on_device,
    sum_balanced,
    sum_on_device,
    sum_round_robin,
)
from tw_reduce._sums.rendezvous import CollectiveKeys, check_keys
from tw_reduce._tensor_info import TensorInfo, below_on, describe_columns


def auto(
    devices: Sequence[str],
    *,
    below_bytes: int | None = None,
    measured: Measured | None = None,
    keys: CollectiveKeys | None = None,
    explain: Callable[[AutoPlan], object] | None = None,
) -> Reducer:
    """Makes a reducer that picks an algorithm and a device for each gradient.

    Args:
      devices: [K] the towers' devices, tower 0 first.
      below_bytes: dense gradients of fewer bytes are packed; None for the threshold in
        ``measured`` or, without it, for fewer than 4,096 elements (262,144 bytes if all
        devices are GPUs).
      measured: the file that ``tw-doctor --json`` wrote on this machine for these
        devices, or its content: dense gradients are added in the way that was fastest
        for gradients of their mean size. None chooses by the kind of devices.
      keys: for NCCL and collectives; None makes an object for this reducer.
      explain: called with the plan whenever the reducer builds, e.g. ``print``.

    Returns:
      A reducer of sums, not means. The plan names the device of each. Sparse
      stays sparse.

    Raises:
      TypeError: ``below_bytes`` is not a whole number, ``measured`` neither a path nor
        a mapping, ``keys`` not a CollectiveKeys, ``explain`` not a function.
      ValueError: no device, or ``below_bytes`` is negative; ``measured`` is not such a
        file, or is of other devices; when called, there is not one device per tower,
        or a chosen algorithm refuses the gradients.
      OSError: the file cannot be read.

    Warns:
      UserWarning: ``measured`` is from another machine or version of TensorFlow.
    """
    return _chosen(KEPT, devices, below_bytes, measured, keys, explain)


def all_reduce(
    devices: Sequence[str],
    *,
    below_bytes: int | None = None,
    measured: Measured | None = None,
    keys: CollectiveKeys | None = None,
    explain: Callable[[AutoPlan], object] | None = None,
) -> Reducer:
    """Makes the reducer for replicated training: every tower gets the sums.

    Gradients are added by the plan of ``auto``, and the sums are copied to each tower's
    own device: a pack as one tensor, which is unpacked there.

    Args:
      devices: [K] the towers' devices, tower 0 first.
      below_bytes: as for ``auto``.
      measured: as for ``auto``.
      keys: as for ``auto``.
      explain: as for ``auto``.

    Returns:
      A reducer of sums; ``mean`` around it makes means. Result n of tower k is on the
      device of ``grads[k][n]``. Sparse stays sparse.

    Raises:
      TypeError: as ``auto``.
      ValueError: as ``auto``.
      OSError: as ``auto``.

    >>> import tensorflow as tf
    >>> from tw_reduce import mean
    >>> reduce = mean(all_reduce(["/cpu:0", "/cpu:0"]))
    >>> [
    ...     tower[0].numpy().tolist()
    ...     for tower in reduce([[tf.ones(2)], [3 * tf.ones(2)]])
    ... ]
    [[2.0, 2.0], [2.0, 2.0]]
    """
    return _chosen(COPIED, devices, below_bytes, measured, keys, explain)


def reducer_for_mode(
    mode: Literal["collective", "cpu", "gpu", "hierarchical", "nccl"],
    devices: Sequence[str],
    *,
    keys: CollectiveKeys | None = None,
) -> Reducer:
    """Returns the reducer that an older mode name stands for.

    Args:
      mode: ``"cpu"`` adds on the first CPU; ``"gpu"`` on the towers' devices,
        the bytes spread evenly; ``"hierarchical"`` in two groups of four;
        ``"nccl"`` and ``"collective"`` by those libraries.
      devices: [K] the towers' devices, tower 0 first.
      keys: the caller's collective keys; None makes an object for this reducer.

    Returns:
      A reducer of sums, not means.

    Raises:
      TypeError: ``keys`` are not a CollectiveKeys.
      ValueError: an unknown mode (the known ones are listed), no device,
        ``"hierarchical"`` with other than eight devices, ``"nccl"`` without a
        GPU for each of several towers.
    """
    if keys is not None:
        check_keys(keys)
    modes = ("collective", "cpu", "gpu", "hierarchical", "nccl")
    if mode not in modes:
        raise ValueError(
            f"Unknown mode {mode!r}; known are {[*modes]}. Or pass a reducer, such as "
            "auto(devices)."
        )
    own, keys = tuple(check_devices(devices)), keys or CollectiveKeys()
    if mode == "hierarchical":
        if len(own) != 8:
            raise ValueError(
                f"mode 'hierarchical' needs eight towers; got {len(own)}. For other "
                "numbers pass hierarchical(groups), e.g. hierarchical([[0, 1], [2, "
                "3]])."
            )
        return packed(hierarchical(EIGHT_GPU_CROSS, devices=own))
    if mode == "nccl" and len(own) > 1:
        check_one_gpu_per_tower(own, len(own))
    return {
        "collective": partial(sum_collective, devices=own, keys=keys),
        "cpu": partial(sum_on_device, device="/cpu:0"),
        "gpu": partial(sum_balanced, devices=own),
        "nccl": partial(sum_nccl, devices=own, keys=keys),
    }[mode]


def _chosen(
    name: str,
    devices: Sequence[str],
    below_bytes: int | None,
    measured: Measured | None,
    keys: CollectiveKeys | None,
    explain: Callable[[AutoPlan], object] | None,
) -> Reducer:
    """Makes ``auto``, or ``all_reduce``, which copies the sums to all towers."""
    devices = check_devices(devices)
    check_below_bytes(below_bytes)
    if keys is not None:
        check_keys(keys)
    if explain is not None:
        check_function(explain=explain)
    times = None if measured is None else _measured_here(measured, devices)
    made = sum_for_all(devices, name, below_bytes, times, keys, explain)

    def deal(reducers: Any, grads: Gradients) -> list[list[Tensorlike]]:
        check_addable(grads)
        check_devices(devices, num_towers=len(grads))
        return made.deal(reducers, grads)

    return replace(made, deal=deal)


def sum_for_all(
    devices: Sequence[str],
    name: str = COPIED,
    below_bytes: int | None = None,
    times: Measurements | None = None,
    keys: CollectiveKeys | None = None,
    explain: Callable[[AutoPlan], object] | None = None,
) -> Dealer:
    """As ``all_reduce``, for checked arguments, and gradients that can be added."""
    devices, keys = tuple(devices), keys or CollectiveKeys()
    reducers = reducers_on(devices, keys) if times else _unmeasured(devices, keys)
    thresholds: Sequence[int | None] = [below_on(devices, below_bytes)]
    if times and below_bytes is None:
        thresholds = times.thresholds
    copies = name == COPIED
    dealt = {
        own if len(thresholds) == 1 else f"{own}_below_{below}": packing(
            reducer, below, copies=copies
        )
        for own, reducer in reducers.items()
        for below in thresholds
    }
    plan = partial(
        make_plan,
        devices=devices,
        below_bytes=below_bytes,
        measured=times,
        copies=copies,
        # Logical GPUs. If no GPU is visible, the graph is for another machine.
        share_gpus=0 < len(tf.config.get_visible_devices("GPU")) < len(devices),
    )
    return Dealer(name, dealt, partial(_reduce_by_plan, name, plan, explain))


def reducers_on(devices: Sequence[str], keys: CollectiveKeys) -> dict[str, Reducer]:
    """Returns every algorithm that measurements can name, bound to devices."""
    return {
        **_unmeasured(devices, keys),
        "sum_round_robin": partial(sum_round_robin, devices=devices),
        "hierarchical": hierarchical(two_groups(len(devices)), devices=devices),
        "sum_collective": partial(sum_collective, devices=devices, keys=keys),
    }


def _unmeasured(devices: Sequence[str], keys: CollectiveKeys) -> dict[str, Reducer]:
    return {
        "sum_on_device": partial(add_on_device, device=devices[0]),
        "sum_balanced": partial(sum_balanced, devices=devices),
        "sum_nccl": partial(sum_nccl, devices=devices, keys=keys),
    }


def two_groups(num_towers: int) -> Groups:
    """Divides towers into two groups of neighbours; a single tower is one group."""
    towers, middle = tuple(range(num_towers)), (num_towers + 1) // 2
    return tuple(group for group in (towers[:middle], towers[middle:]) if group)


def _measured_here(measured: Measured, devices: Sequence[str]) -> Measurements:
    """Reads measurements and checks that they are of these devices and this machine."""
    own = as_measurements(measured)
    gpus = tf.config.list_physical_devices("GPU")
    details = map(tf.config.experimental.get_device_details, gpus)
    names = [detail.get("device_name", "GPU") for detail in details]
    here = described_here(tf.__version__, names)
    check_made_for(own, list(map(canonical_device, devices)), here)
    return own


def _reduce_by_plan(
    name: str,
    plan_for: Callable[[Sequence[TensorInfo]], AutoPlan],
    explain: Callable[[AutoPlan], object] | None,
    reducers: Mapping[str, Reducer],
    grads: Gradients,
) -> list[list[Tensorlike]]:
    plan = plan_for(describe_columns(grads))
    if explain is not None:
        explain(plan)
    routes = [own.algorithm for own in plan.choices]
    if not reducers.keys() >= set(routes):
        routes = [f"{own}_below_{plan.below_bytes}" for own in routes]
    with tf.name_scope(name):
        return deal_out(routes, reducers, grads)
