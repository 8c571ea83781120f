"""All-reduce by TensorFlow's collective ops, one op per device and gradient.

The first version of the op is used on purpose: the second one deadlocks in a
``tf.function`` unless ordered by tokens, the third crashes on CPUs. On CPUs
this is several times slower than adding; it is for devices with their own
links, and for tensors too large to meet in one place.
"""

from collections.abc import Sequence

import tensorflow as tf

from tw_core import without_autograph
from tw_reduce._check_devices import check_distinct, check_one_device_per_tower
from tw_reduce._collective_keys import CollectiveKeys
from tw_reduce._flat import join
from tw_reduce._sparse import densify_column
from tw_reduce._together import all_together, check_traced
from tw_reduce._tower_tensors import (
    Tensorlike,
    TowerTensors,
    check_tower_tensors,
    columns,
    rows,
)


@without_autograph
def sum_collective(
    grads: TowerTensors,
    *,
    devices: Sequence[str],
    keys: CollectiveKeys,
    timeout_seconds: float = 0.0,
) -> list[list[tf.Tensor]]:
    """Adds the gradients of all towers in a ring over their devices.

    A reduction waits until all towers have joined. Using any tower's result
    makes all of them join; what can still keep one away, for ever or until
    ``timeout_seconds``, is a gradient that never comes, or a step that runs in
    parts. After a timeout TensorFlow refuses collectives: in a session until it
    is closed, in a ``tf.function`` until the process ends.

    Args:
      grads: [K][N]; ``IndexedSlices`` become dense, for which one tower's must
        know its ``dense_shape``.
      devices: [K] the towers' devices, no two alike.
      keys: the caller's; one object for all reducers of the process.
      timeout_seconds: seconds that one reduction may take before the step
        fails; 0 for no bound.

    Returns:
      [K][N] sums, not means, each tower's on its device. One tower is returned
      as it is.

    Raises:
      ValueError: a bad list of gradients; devices that are not one per tower,
        distinct and known; an ``IndexedSlices`` of unknown dense shape.
      TypeError: something that is no tensor.
      RuntimeError: called eagerly.
    """
    check_tower_tensors(grads, caller="sum_collective")
    if len(grads) == 1:
        return [list(grads[0])]
    check_traced(caller="sum_collective")
    check_one_device_per_tower(devices, len(grads), caller="sum_collective")
    check_distinct(devices, caller="sum_collective")
    group = keys.group(devices)
    with tf.name_scope("sum_collective"):
        sums = [
            _reduce(column, devices, (group, keys.instance()), timeout_seconds)
            for column in columns(grads)
        ]
    return rows(sums, len(grads))


def _reduce(
    column: Sequence[Tensorlike],
    devices: Sequence[str],
    key: tuple[int, int],
    timeout_seconds: float,
) -> list[tf.Tensor]:
    dense = densify_column(column, caller="sum_collective")
    size = dense[0].shape.num_elements()
    if size == 0:
        return dense
    sums = []
    for tensor, device in zip(dense, devices, strict=True):
        with tf.device(device):
            # TensorFlow crashes on an empty tensor: none may arrive.
            sent = tensor if size else join([tensor, tf.zeros([1], tensor.dtype)])
            total = _reduce_one(sent, len(devices), key, timeout_seconds)
            sums.append(total if size else tf.reshape(total[:-1], tf.shape(tensor)))
    return all_together(sums, devices)


def _reduce_one(
    tensor: tf.Tensor, group_size: int, key: tuple[int, int], timeout_seconds: float
) -> tf.Tensor:
    return tf.raw_ops.CollectiveReduce(
        input=tensor,
        group_size=group_size,
        group_key=key[0],
        instance_key=key[1],
        merge_op="Add",
        final_op="Id",
        subdiv_offsets=[0],
        timeout_seconds=timeout_seconds,
    )
