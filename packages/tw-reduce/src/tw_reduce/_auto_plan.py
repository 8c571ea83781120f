"""Choosing for each gradient how it is added, as data that can be printed.

The choice follows what was measured (``docs/design/reduce.md``). CPU devices of
one process share one memory and one pool of threads, so one device adds all:
spreading only adds transfers. GPUs add over their own links. Devices of several
kinds or tasks share the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

import tw_core
from tw_core.checks import check_whole_number
from tw_reduce._combinators.packed import DEFAULT_BELOW, plan_packs
from tw_reduce._devices import check_device_strings
from tw_reduce._sums.nccl import NCCL_DTYPES
from tw_reduce._sums.sum_balanced import plan_balanced
from tw_reduce._tensor_info import TensorInfo, check_infos


@dataclass(frozen=True)
class Choice:
    """How one gradient is added.

    Attributes:
      tensor: which gradient.
      algorithm: ``"sum_on_device"``, ``"sum_balanced"`` or ``"sum_nccl"``.
      devices: where it is added.
      packed_with: number of gradients that travel in its pack, itself counted;
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
        told = f"{'?' if size is None else format(size, ',')} bytes"
        kind = f"{'sparse ' if self.tensor.is_sparse else ''}{self.tensor.dtype}"
        pack = f"pack of {self.packed_with}" if self.packed_with > 1 else "alone"
        return (
            f"{self.tensor.index:4d} {told:>17} {kind:<15} {self.algorithm:<13} "
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
        """A line a gradient, and one with the sum of the known bytes."""
        known = sum(choice.tensor.num_bytes or 0 for choice in self.choices)
        total = f"{len(self.choices)} gradients, {known:,} bytes a tower"
        return "\n".join([*map(str, self.choices), total])


def plan_auto(
    infos: Sequence[TensorInfo], devices: Sequence[str], *, below: int = DEFAULT_BELOW
) -> AutoPlan:
    """Chooses algorithm and device for each gradient.

    Args:
      infos: [N] of one tower.
      devices: [K] the towers' devices.
      below: elements; dense gradients with fewer are packed.

    Returns:
      The plan; the same for the same input.

    Raises:
      TypeError: something else than lists of infos and of strings; ``below`` is
        no whole number.
      ValueError: no device, or ``below`` is negative.
    """
    check_device_strings(devices, caller="plan_auto")
    check_whole_number("plan_auto", below=below, at_least=0)
    check_infos(infos, caller="plan_auto")
    by_algorithm: dict[tuple[str, str], list[TensorInfo]] = {}
    for info in infos:
        by_algorithm.setdefault(_choose(info, devices), []).append(info)
    choices = [
        Choice(info, algorithm, places, len(unit), why)
        for (algorithm, why), own in by_algorithm.items()
        for unit, places in _place(own, algorithm, devices, below)
        for info in unit
    ]
    return AutoPlan(tuple(sorted(choices, key=lambda choice: choice.tensor.index)))


def _choose(info: TensorInfo, devices: Sequence[str]) -> tuple[str, str]:
    specs = [tf.DeviceSpec.from_string(tw_core.canonical_device(d)) for d in devices]
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
    infos: Sequence[TensorInfo], algorithm: str, devices: Sequence[str], below: int
) -> list[tuple[list[TensorInfo], tuple[str, ...]]]:
    by_index = {info.index: info for info in infos}
    plan = plan_packs(infos, below=below)
    units = [[by_index[n] for n in pack] for pack in plan.packs]
    units += [[by_index[n]] for n in plan.alone]
    if algorithm == "sum_nccl":
        return [(unit, tuple(devices)) for unit in units]
    if algorithm == "sum_on_device":
        return [(unit, (devices[0],)) for unit in units]
    spread = plan_balanced([_unit_bytes(unit) for unit in units], devices)
    turns = [(devices[index],) for index in spread.device_of]
    return list(zip(units, turns, strict=True))


def _unit_bytes(unit: Sequence[TensorInfo]) -> int | None:
    sizes = [info.num_bytes for info in unit]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
