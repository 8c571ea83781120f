"""All-reduce by adding every gradient on one device."""

import tensorflow as tf

from tw_core import without_autograph
from tw_core.checks import check_text
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
      TypeError: something that is no tensor.
    """
    grads = checked_towers(grads, caller="sum_on_device")
    check_addable(grads, caller="sum_on_device")
    check_text("sum_on_device", device=device)
    check_reduce_devices([device], caller="sum_on_device")
    with tf.name_scope("sum_on_device"):
        sums = add_columns(columns(grads), [device] * len(grads[0]))
    return [list(sums) for _ in grads]
