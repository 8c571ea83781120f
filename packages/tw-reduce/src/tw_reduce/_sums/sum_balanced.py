"""All-reduce by adding each gradient on one device, bytes spread evenly.

The largest gradient is placed first, each on the device with the fewest bytes
so far (longest processing time first): never more than 4/3 of the best spread.
Source: R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from tw_core import without_autograph
from tw_core.checks import check_list, check_whole_number
from tw_reduce._checked_towers import checked_towers
from tw_reduce._devices import check_device_strings, check_reduce_devices
from tw_reduce._reducer import (
    Tensorlike,
    TowerTensors,
    check_addable,
    columns,
)
from tw_reduce._sums.add_n import add_columns
from tw_reduce._tensor_info import describe_columns


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
      TypeError: something else than whole numbers and strings.
      ValueError: no device, or a negative size.

    >>> plan_balanced([10, 40, 30, 10], ["/cpu:0", "/cpu:1"]).device_of
    (1, 0, 1, 0)
    """
    check_list("plan_balanced", num_bytes=num_bytes, of="whole numbers", empty=True)
    check_device_strings(devices, caller="plan_balanced")
    for size in num_bytes:
        if size is not None:
            check_whole_number("plan_balanced", num_bytes=size, at_least=0)
    known = [size for size in num_bytes if size is not None]
    usual = max(1, sum(known) // len(known)) if known else 1
    sizes = [usual if size is None else size for size in num_bytes]
    device_of = [0] * len(sizes)
    loads = [0] * len(devices)
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        lightest = min(range(len(devices)), key=loads.__getitem__)
        device_of[n] = lightest
        loads[lightest] += sizes[n]
    return BalancePlan(tuple(devices), tuple(device_of), tuple(loads))


@without_autograph
def sum_balanced(
    grads: TowerTensors, *, devices: Sequence[str]
) -> list[list[Tensorlike]]:
    """Adds each gradient on one device, the bytes spread evenly over devices.

    Args:
      grads: [K][N], K >= 1; ``grads[k][n]`` is tower k's gradient for variable
        n, of one shape and dtype across towers.
      devices: where to add; at least one.

    Returns:
      [K][N] sums, not means. A sum stays on the device that added it. Sparse
      stays sparse.

    Raises:
      ValueError: no tower, towers of unequal length, None, differing dtypes or
        shapes, no device or an unknown one.
      TypeError: something that is no tensor.
    """
    grads = checked_towers(grads, caller="sum_balanced")
    check_addable(grads, caller="sum_balanced")
    check_reduce_devices(devices, caller="sum_balanced")
    plan = plan_balanced([info.num_bytes for info in describe_columns(grads)], devices)
    places = [devices[index] for index in plan.device_of]
    with tf.name_scope("sum_balanced"):
        sums = add_columns(columns(grads), places)
    return [list(sums) for _ in grads]
