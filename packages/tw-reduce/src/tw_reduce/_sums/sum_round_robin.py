"""All-reduce by adding each gradient on one device, devices taken in turn."""

from collections.abc import Sequence

import tensorflow as tf

from tw_core import without_autograph
from tw_reduce._checked_towers import checked_towers
from tw_reduce._devices import check_reduce_devices
from tw_reduce._reducer import (
    Tensorlike,
    TowerTensors,
    check_addable,
    columns,
)
from tw_reduce._sums.add_n import add_columns


@without_autograph
def sum_round_robin(
    grads: TowerTensors, *, devices: Sequence[str]
) -> list[list[Tensorlike]]:
    """Adds gradient n of every tower on ``devices[n % len(devices)]``.

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
    grads = checked_towers(grads, caller="sum_round_robin")
    check_addable(grads, caller="sum_round_robin")
    check_reduce_devices(devices, caller="sum_round_robin")
    turns = [devices[n % len(devices)] for n in range(len(grads[0]))]
    with tf.name_scope("sum_round_robin"):
        sums = add_columns(columns(grads), turns)
    return [list(sums) for _ in grads]
