"""The plan of ``auto``, as data: the algorithm and device that add each gradient.

It can be printed, and is based on measurements (``docs/design/reduce.md``). CPU
devices of one process share one memory and one pool of threads, so one device adds all:
spreading only adds transfers. GPUs add over their own links. Devices of several kinds
or tasks share the bytes. Measurements of ``tw-doctor`` on the machine take precedence
(``_measured``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TypeAlias

import tensorflow as tf

from tw_core.devices import canonical_device
from tw_core.internal import check_flag
from tw_reduce._checks import check_device_strings
from tw_reduce._combinators.packed import check_below_bytes
from tw_reduce._measured import (
    Measured,
    Measurements,
    Strategy,
    as_measurements,
    check_made_for,
    choose_strategy,
)
from tw_reduce._sums.collectives import COLLECTIVE_DTYPES, NCCL_DTYPES
from tw_reduce._sums.one_device import balanced
from tw_reduce._tensor_info import (
    TensorInfo,
    below_on,
    check_infos,
    is_small,
    packs_of,
)

_Specs: TypeAlias = Sequence[tf.DeviceSpec]


@dataclass(frozen=True)
class Choice:
    """How one gradient is added.

    Attributes:
      tensor: the gradient.
      algorithm: ``"sum_on_device"``, ``"sum_balanced"`` or ``"sum_nccl"``; with
        measurements also ``"sum_round_robin"``, ``"hierarchical"`` or
        ``"sum_collective"``.
      devices: where it is added.
      packed_with: number of gradients in its pack, itself included; 1 if it is not
        packed.
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
    """The choices of ``auto`` for N gradients; ``str(plan)`` is a table.

    Attributes:
      choices: [N].
      below_bytes: dense gradients of fewer bytes are packed; None for those of fewer
        than 4,096 elements. On GPUs it is never None.
    """

    choices: tuple[Choice, ...]
    below_bytes: int | None = None

    @property
    def bytes_on(self) -> dict[str, int]:
        """Bytes per tower that each device adds, as far as known.

        Bytes that NCCL adds count on every device that takes part.
        """
        loads: dict[str, int] = {}
        for choice in self.choices:
            for device in choice.devices:
                loads[device] = loads.get(device, 0) + (choice.tensor.num_bytes or 0)
        return loads

    def __str__(self) -> str:
        """One line per gradient, and one with the total of the known bytes."""
        known = sum(choice.tensor.num_bytes or 0 for choice in self.choices)
        total = f"{len(self.choices)} gradients, {known:,} bytes per tower"
        return "\n".join([*map(str, self.choices), total])


def plan_auto(
    infos: Sequence[TensorInfo],
    devices: Sequence[str],
    *,
    below_bytes: int | None = None,
    measured: Measured | None = None,
    copies: bool = False,
) -> AutoPlan:
    """Chooses algorithm and device for each gradient.

    Args:
      infos: [N] of one tower.
      devices: [K] the towers' devices.
      below_bytes: as for ``auto``.
      measured: as for ``auto``; assumed to be from this machine.
      copies: whether every tower gets a copy of the sums, as from ``all_reduce``; only
        matters with ``measured``.

    Returns:
      The plan; the same for the same input.

    Raises:
      TypeError: something other than lists of ``TensorInfo`` and of strings;
        ``below_bytes`` is not a whole number, or ``copies`` not a bool.
      ValueError: no device, or ``below_bytes`` is negative; ``measured`` is damaged or
        of other devices.
    """
    devices = check_device_strings(devices)
    check_below_bytes(below_bytes)
    check_infos(infos)
    check_flag(copies=copies)
    own = None if measured is None else as_measurements(measured)
    if own is not None:
        check_made_for(own, list(map(canonical_device, devices)), {})
    return make_plan(infos, devices, below_bytes, own, copies=copies)


def make_plan(
    infos: Sequence[TensorInfo],
    devices: Sequence[str],
    below_bytes: int | None,
    measured: Measurements | None = None,
    *,
    copies: bool = False,
    share_gpus: bool = False,  # whether several of the devices are parts of one GPU
) -> AutoPlan:
    """As ``plan_auto``, for checked arguments."""
    specs = [tf.DeviceSpec.from_string(canonical_device(own)) for own in devices]
    choose = partial(_choose, specs=specs, share_gpus=share_gpus)
    if measured is not None:
        sizes = [info.num_bytes for info in infos if not info.is_sparse]
        known = [size for size in sizes if size is not None]
        strategy = choose_strategy(measured, known, copies=copies)
        below_bytes = strategy.below_bytes if below_bytes is None else below_bytes
        choose = partial(_follow, strategy, below_bytes, specs=specs)
    below_bytes = below_on(devices, below_bytes)
    by_algorithm: dict[tuple[str, str], list[TensorInfo]] = {}
    for info in infos:
        by_algorithm.setdefault(choose(info), []).append(info)
    choices = [
        Choice(info, algorithm, places, len(unit), why)
        for (algorithm, why), own in by_algorithm.items()
        for unit, places in _place(own, algorithm, devices, below_bytes)
        for info in unit
    ]
    ordered = sorted(choices, key=attrgetter("tensor.index"))
    return AutoPlan(tuple(ordered), below_bytes)


def _follow(
    strategy: Strategy, below_bytes: int, info: TensorInfo, specs: _Specs
) -> tuple[str, str]:
    """Chooses the measured algorithm if it supports the gradient."""
    algorithm = strategy.small if is_small(info, below_bytes) else strategy.large
    carried = {"sum_nccl": NCCL_DTYPES, "sum_collective": COLLECTIVE_DTYPES}
    if info.is_sparse or info.dtype not in carried.get(algorithm, [info.dtype]):
        return _choose(info, specs)
    return algorithm, f"the fastest measured was {strategy}"


def _choose(
    info: TensorInfo, specs: _Specs, *, share_gpus: bool = False
) -> tuple[str, str]:
    tasks = {(spec.job, spec.task) for spec in specs}
    kinds = {spec.device_type for spec in specs}
    distinct = len({spec.to_string() for spec in specs}) == len(specs)
    if kinds == {"CPU"} and len(tasks) == 1:
        return "sum_on_device", "CPU devices share one memory"
    if kinds != {"GPU"} or len(tasks) > 1 or not distinct:
        return "sum_balanced", "devices differ in kind or task, or are shared"
    if share_gpus:
        return "sum_balanced", "NCCL needs a GPU per tower"
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
    if algorithm in ("sum_nccl", "sum_collective", "hierarchical"):
        return [(unit, tuple(devices)) for unit in units]
    if algorithm == "sum_on_device":
        return [(unit, (devices[0],)) for unit in units]
    if algorithm == "sum_round_robin":
        turns = [(devices[n % len(devices)],) for n in range(len(units))]
        return list(zip(units, turns, strict=True))
    sizes = [[info.num_bytes for info in unit] for unit in units]
    known = [None if None in own else sum(size or 0 for size in own) for own in sizes]
    placed = [(devices[index],) for index in balanced(known, devices).device_of]
    return list(zip(units, placed, strict=True))
