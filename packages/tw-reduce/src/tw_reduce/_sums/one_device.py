"""All-reduce by adding each gradient on one device: the same for all, or in turn.

``sum_balanced`` places the largest gradient first, each on the device with the fewest
bytes so far (longest processing time first): never more than 4/3 of the best spread.
Source: R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from tw_core.checks import check_list, check_text, check_whole_number
from tw_core.modes import without_autograph
from tw_reduce._checked_towers import CheckedTowers, addable_towers
from tw_reduce._checks import check_device_strings, check_devices
from tw_reduce._reducer import Tensorlike, TowerTensors, columns
from tw_reduce._sums.add_n import add_columns
from tw_reduce._tensor_info import num_bytes_of_columns


@dataclass(frozen=True)
class BalancePlan:
    """Which device adds which gradient.

    Attributes:
      devices: as given.
      device_of: [N] index into ``devices`` for each gradient.
      loads: bytes that each device adds per tower.
    """

    devices: tuple[str, ...]
    device_of: tuple[int, ...]
    loads: tuple[int, ...]


def plan_balanced(
    num_bytes: Sequence[int | None], devices: Sequence[str]
) -> BalancePlan:
    """Spreads gradients over devices, the largest first onto the least loaded.

    Args:
      num_bytes: [N] bytes of each gradient of one tower; None where unknown:
        counted as the mean of the known ones (as 1 byte if none is known).
      devices: at least one.

    Returns:
      The plan; the same for the same input, ties going to the earlier device.

    Raises:
      TypeError: something other than whole numbers and strings.
      ValueError: no device, or a negative size.

    >>> plan_balanced([10, 40, 30, 10], ["/cpu:0", "/cpu:1"]).device_of
    (1, 0, 1, 0)
    """
    check_list("plan_balanced", num_bytes=num_bytes, of="whole numbers", empty=True)
    check_device_strings(devices, caller="plan_balanced")
    for size in num_bytes:
        if size is not None:
            check_whole_number("plan_balanced", num_bytes=size, at_least=0)
    return balanced(num_bytes, devices)


def balanced(num_bytes: Sequence[int | None], devices: Sequence[str]) -> BalancePlan:
    """As ``plan_balanced``, of checked arguments."""
    known = [size for size in num_bytes if size is not None]
    usual = max(1, sum(known) // len(known)) if known else 1
    sizes = [usual if size is None else size for size in num_bytes]
    device_of = [0] * len(sizes)
    loads = [0] * len(devices)
    for n in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        lightest = min(range(len(devices)), key=loads.__getitem__)
        device_of[n] = lightest
        loads[lightest] += sizes[n]
    return BalancePlan(tuple(devices), tuple(device_of), tuple(loads))


@without_autograph
def sum_on_device(grads: TowerTensors, *, device: str) -> list[list[Tensorlike]]:
    """Adds the gradients of all towers on ``device``.

    Args:
      grads: [K][N], K >= 1; ``grads[k][n]`` is tower k's gradient for variable
        n, of one shape and dtype across towers.
      device: where to add.

    Returns:
      [K][N] sums, not means, on ``device``. Sparse stays sparse.

    Raises:
      ValueError: no tower, towers of unequal length, None, differing dtypes or
        shapes, an unknown device.
      TypeError: something that is not a tensor.
    """
    grads = addable_towers(grads, caller="sum_on_device")
    check_text("sum_on_device", device=device)
    check_devices([device], caller="sum_on_device")
    return _add(grads, [device] * len(grads[0]), "sum_on_device")


@without_autograph
def sum_round_robin(
    grads: TowerTensors, *, devices: Sequence[str]
) -> list[list[Tensorlike]]:
    """Adds gradient n of every tower on ``devices[n % len(devices)]``.

    Args:
      grads: [K][N]; as for ``sum_on_device``.
      devices: where to add; at least one.

    Returns:
      [K][N] sums, not means. A sum stays on the device that added it. Sparse
      stays sparse.

    Raises:
      ValueError: as ``sum_on_device``; no device.
      TypeError: something that is not a tensor.
    """
    grads = addable_towers(grads, caller="sum_round_robin")
    check_devices(devices, caller="sum_round_robin")
    turns = [devices[n % len(devices)] for n in range(len(grads[0]))]
    return _add(grads, turns, "sum_round_robin")


@without_autograph
def sum_balanced(
    grads: TowerTensors, *, devices: Sequence[str]
) -> list[list[Tensorlike]]:
    """Adds each gradient on one device, the bytes spread evenly over devices.

    Args:
      grads: [K][N]; as for ``sum_on_device``.
      devices: where to add; at least one.

    Returns:
      [K][N] sums, not means. A sum stays on the device that added it. Sparse
      stays sparse.

    Raises:
      ValueError: as ``sum_on_device``; no device.
      TypeError: something that is not a tensor.
    """
    grads = addable_towers(grads, caller="sum_balanced")
    check_devices(devices, caller="sum_balanced")
    plan = balanced(num_bytes_of_columns(grads), devices)
    return _add(grads, [devices[index] for index in plan.device_of], "sum_balanced")


def _add(
    grads: CheckedTowers, places: Sequence[str], scope: str
) -> list[list[Tensorlike]]:
    with tf.name_scope(scope):
        sums = add_columns(columns(grads), places)
    return [list(sums) for _ in grads]
