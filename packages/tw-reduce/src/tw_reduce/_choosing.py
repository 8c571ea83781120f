"""Choosing a reducer: for each gradient by what was measured, or by an older name.

The choice of ``auto`` is data that can be printed, and follows what was measured
(``docs/design/reduce.md``). CPU devices of one process share one memory and one pool
of threads, so one device adds all: spreading only adds transfers. GPUs add over their
own links. Devices of several kinds or tasks share the bytes.

Source of the mode names: tensorpack 0.11, ``SyncMultiGPUReplicatedBuilder``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import tensorflow as tf

from tw_core.checks import check_function
from tw_core.devices import canonical_device
from tw_core.renames import renamed_arguments
from tw_reduce import _renamed
from tw_reduce._checked_towers import CheckedTowers
from tw_reduce._checks import check_addable, check_device_strings, check_devices
from tw_reduce._combinators.mean import Dealer
from tw_reduce._combinators.packed import check_below_bytes, packed, packs_of
from tw_reduce._combinators.partition import deal_out
from tw_reduce._reducer import Reducer, Tensorlike
from tw_reduce._sums.collectives import (
    NCCL_DTYPES,
    check_one_gpu_per_tower,
    sum_collective,
    sum_nccl,
)
from tw_reduce._sums.hierarchical import EIGHT_GPU_CROSS, hierarchical
from tw_reduce._sums.one_device import balanced, sum_balanced, sum_on_device
from tw_reduce._sums.rendezvous import CollectiveKeys, check_keys
from tw_reduce._tensor_info import TensorInfo, check_infos, describe_columns


@dataclass(frozen=True)
class Choice:
    """How one gradient is added.

    Attributes:
      tensor: which gradient.
      algorithm: ``"sum_on_device"``, ``"sum_balanced"`` or ``"sum_nccl"``.
      devices: where it is added.
      packed_with: number of gradients that travel in its pack, itself included;
        1 if it travels alone.
      why: the reason, in words.
    """

    tensor: TensorInfo
    algorithm: str
    devices: tuple[str, ...]
    packed_with: int
    why: str

    def __str__(self) -> str:
        """A line: position, bytes, dtype, algorithm, devices, pack, reason."""
        size = self.tensor.num_bytes
        volume = f"{'?' if size is None else format(size, ',')} bytes"
        kind = f"{'sparse ' if self.tensor.is_sparse else ''}{self.tensor.dtype}"
        pack = f"pack of {self.packed_with}" if self.packed_with > 1 else "alone"
        return (
            f"{self.tensor.index:4d} {volume:>17} {kind:<15} {self.algorithm:<13} "
            f"{','.join(self.devices):<9} {pack:<11} {self.why}"
        )


@dataclass(frozen=True)
class AutoPlan:
    """What ``auto`` does with each of N gradients; ``str(plan)`` is a table.

    Attributes:
      choices: [N].
    """

    choices: tuple[Choice, ...]

    @property
    def bytes_on(self) -> dict[str, int]:
        """Known bytes of a tower that each device adds, by device.

        What NCCL adds counts on every device that takes part.
        """
        loads: dict[str, int] = {}
        for choice in self.choices:
            for device in choice.devices:
                loads[device] = loads.get(device, 0) + (choice.tensor.num_bytes or 0)
        return loads

    def __str__(self) -> str:
        """One line per gradient, and one with the sum of the known bytes."""
        known = sum(choice.tensor.num_bytes or 0 for choice in self.choices)
        total = f"{len(self.choices)} gradients, {known:,} bytes per tower"
        return "\n".join([*map(str, self.choices), total])


@renamed_arguments(**_renamed.PACKING)
def plan_auto(
    infos: Sequence[TensorInfo],
    devices: Sequence[str],
    *,
    below_bytes: int | None = None,
) -> AutoPlan:
    """Chooses algorithm and device for each gradient.

    Args:
      infos: [N] of one tower.
      devices: [K] the towers' devices.
      below_bytes: dense gradients of fewer bytes are packed; None for those of
        fewer than 4,096 elements.

    Returns:
      The plan; the same for the same input.

    Raises:
      TypeError: something other than lists of infos and of strings; ``below_bytes``
        is not a whole number.
      ValueError: no device, or ``below_bytes`` is negative.
    """
    check_device_strings(devices, caller="plan_auto")
    check_below_bytes(below_bytes, caller="plan_auto")
    check_infos(infos, caller="plan_auto")
    return _plan(infos, devices, below_bytes)


@renamed_arguments(**_renamed.PACKING)
def auto(
    devices: Sequence[str],
    *,
    below_bytes: int | None = None,
    keys: CollectiveKeys | None = None,
    explain: Callable[[AutoPlan], object] | None = None,
) -> Reducer:
    """Makes a reducer that picks an algorithm and a device for each gradient.

    Args:
      devices: [K] the towers' devices, tower 0 first.
      below_bytes: dense gradients of fewer bytes travel packed; None for those of
        fewer than 4,096 elements.
      keys: for NCCL; None makes an object for this reducer.
      explain: called with the plan whenever the reducer builds, e.g. ``print``.

    Returns:
      A reducer of sums, not means. Where each lies is in the plan. Sparse
      stays sparse.

    Raises:
      TypeError: ``below_bytes`` is not a whole number, ``keys`` not a
        CollectiveKeys, ``explain`` not a function.
      ValueError: no device, or ``below_bytes`` is negative; when called, another
        number of towers than devices, and what the chosen algorithms refuse.
    """
    check_devices(devices, caller="auto")
    check_below_bytes(below_bytes, caller="auto")
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
    packing = {
        name: packed(own, below_bytes=below_bytes) for name, own in reducers.items()
    }
    make_plan = partial(_plan, devices=settled, below_bytes=below_bytes)
    reduce = partial(_reduce_by_plan, make_plan, settled, explain)
    return Dealer("auto", packing, reduce)


def reducer_for_mode(
    mode: str, devices: Sequence[str], *, keys: CollectiveKeys | None = None
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
        check_keys(keys, caller="reducer_for_mode")
    makers: dict[str, Callable[[Sequence[str], CollectiveKeys], Reducer]] = {
        "collective": lambda own, keys: partial(sum_collective, devices=own, keys=keys),
        "cpu": lambda own, keys: partial(sum_on_device, device="/cpu:0"),
        "gpu": lambda own, keys: partial(sum_balanced, devices=own),
        "hierarchical": lambda own, keys: _in_two_groups(own),
        "nccl": _by_nccl,
    }
    if mode not in list(makers):
        raise ValueError(
            f"reducer_for_mode: unknown mode {mode!r}; known are {sorted(makers)}. "
            "Or pass a reducer, such as auto(devices)."
        )
    check_devices(devices, caller=f"reducer_for_mode: mode {mode!r}")
    return makers[mode](tuple(devices), keys or CollectiveKeys())


def _reduce_by_plan(
    make_plan: Callable[[Sequence[TensorInfo]], AutoPlan],
    devices: Sequence[str],
    explain: Callable[[AutoPlan], object] | None,
    reducers: Mapping[str, Reducer],
    grads: CheckedTowers,
) -> list[list[Tensorlike]]:
    check_addable(grads, caller="auto")
    check_devices(devices, caller="auto", num_towers=len(grads))
    plan = make_plan(describe_columns(grads))
    if explain is not None:
        explain(plan)
    with tf.name_scope("auto"):
        return deal_out([own.algorithm for own in plan.choices], reducers, grads)


def _plan(
    infos: Sequence[TensorInfo], devices: Sequence[str], below_bytes: int | None
) -> AutoPlan:
    by_algorithm: dict[tuple[str, str], list[TensorInfo]] = {}
    for info in infos:
        by_algorithm.setdefault(_choose(info, devices), []).append(info)
    choices = [
        Choice(info, algorithm, places, len(unit), why)
        for (algorithm, why), own in by_algorithm.items()
        for unit, places in _place(own, algorithm, devices, below_bytes)
        for info in unit
    ]
    return AutoPlan(tuple(sorted(choices, key=lambda choice: choice.tensor.index)))


def _choose(info: TensorInfo, devices: Sequence[str]) -> tuple[str, str]:
    specs = [tf.DeviceSpec.from_string(canonical_device(d)) for d in devices]
    tasks = {(spec.job, spec.task) for spec in specs}
    kinds = {spec.device_type for spec in specs}
    distinct = len({spec.to_string() for spec in specs}) == len(specs)
    if kinds == {"CPU"} and len(tasks) == 1:
        return "sum_on_device", "CPU devices share one memory"
    if kinds != {"GPU"} or len(tasks) > 1 or not distinct:
        return "sum_balanced", "devices differ in kind or task, or are shared"
    if info.is_sparse:
        return "sum_balanced", "NCCL cannot carry sparse rows"
    if info.dtype not in NCCL_DTYPES:
        return "sum_balanced", f"NCCL cannot add {info.dtype}"
    return "sum_nccl", "GPUs have links of their own"


def _place(
    infos: Sequence[TensorInfo],
    algorithm: str,
    devices: Sequence[str],
    below_bytes: int | None,
) -> list[tuple[list[TensorInfo], tuple[str, ...]]]:
    plan = packs_of(infos, below_bytes)
    units = [[infos[n] for n in pack] for pack in plan.packs]
    units += [[infos[n]] for n in plan.alone]
    if algorithm == "sum_nccl":
        return [(unit, tuple(devices)) for unit in units]
    if algorithm == "sum_on_device":
        return [(unit, (devices[0],)) for unit in units]
    loads = balanced([_unit_bytes(unit) for unit in units], devices)
    turns = [(devices[index],) for index in loads.device_of]
    return list(zip(units, turns, strict=True))


def _unit_bytes(unit: Sequence[TensorInfo]) -> int | None:
    sizes = [info.num_bytes for info in unit]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _in_two_groups(devices: Sequence[str]) -> Reducer:
    if len(devices) != 8:
        raise ValueError(
            "reducer_for_mode: mode 'hierarchical' means eight towers; got "
            f"{len(devices)}. For other numbers pass hierarchical(groups), e.g. "
            "hierarchical([[0, 1], [2, 3]])."
        )
    return packed(hierarchical(EIGHT_GPU_CROSS, devices=devices))


def _by_nccl(devices: Sequence[str], keys: CollectiveKeys) -> Reducer:
    if len(devices) > 1:
        check_one_gpu_per_tower(devices, len(devices))
    return partial(sum_nccl, devices=devices, keys=keys)
