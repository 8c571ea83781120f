"""All-reduce by TensorFlow's collective ops, one op per device and gradient.

The first version of the op is used on purpose: the second one deadlocks in a
``tf.function`` unless ordered by tokens, the third crashes on CPUs. On CPUs
this is several times slower than adding; it is for devices with their own
links, and for tensors too large to meet in one place.
"""

from collections.abc import Sequence

import tensorflow as tf

from tw_core import (
    builds_session_graph,
    orders_effects,
    without_autograph,
)
from tw_core.checks import check_number
from tw_reduce._checked_towers import checked_towers
from tw_reduce._devices import check_distinct, check_one_device_per_tower
from tw_reduce._flat import join
from tw_reduce._reducer import (
    TowerTensors,
    check_addable,
    columns,
    rows,
)
from tw_reduce._sums.collective_keys import CollectiveKeys, check_keys
from tw_reduce._sums.joint_barrier import after, check_traced, in_turn
from tw_reduce._sums.sparse import densify_column

_DTYPES = ("bfloat16", "float16", "float32", "float64", "int32", "int64")


@without_autograph
def sum_collective(
    grads: TowerTensors,
    *,
    devices: Sequence[str],
    keys: CollectiveKeys,
    timeout_seconds: float = 0.0,
) -> list[list[tf.Tensor]]:
    """Adds the gradients of all towers in a ring over their devices.

    A reduction waits until all towers have joined. Using any result makes all
    towers join with all of their gradients; what can still keep one away, for
    ever or until ``timeout_seconds``, is a gradient that never comes, or a step
    that runs in parts. After a timeout TensorFlow refuses collectives: in a
    session until it is closed, in a ``tf.function`` until the process ends.

    Several threads may run the step at the same time: they reduce one after the
    other, each when all of its gradients are there.

    Args:
      grads: [K][N]; ``IndexedSlices`` become dense, for which one tower's must
        know its ``dense_shape``.
      devices: [K] the towers' devices, no two alike.
      keys: the caller's; one object for all reducers of the process.
      timeout_seconds: seconds that one reduction may take before the step
        fails; 0 for no bound. Under a bound TensorFlow keeps a sleeping thread
        per tower and reduction until the bound has passed, also where the
        reduction has ended: pack, and take a few seconds.

    Returns:
      [K][N] sums, not means, each tower's on its device. One tower is returned
      as it is.

    Raises:
      ValueError: a bad list of gradients; devices that are not one per tower,
        distinct and known; an ``IndexedSlices`` of unknown dense shape.
      TypeError: something that is no tensor; a dtype that collectives do not
        add; ``keys`` that are none.
      RuntimeError: called eagerly, in a ``jit_compile=True`` function, or in a
        ``tf.function`` that a session graph calls.
    """
    grads = checked_towers(grads, caller="sum_collective")
    check_keys(keys, caller="sum_collective")
    check_number("sum_collective", timeout_seconds=timeout_seconds, at_least=0)
    if len(grads) == 1:
        return [list(grads[0])]
    check_traced(caller="sum_collective")
    check_addable(grads, caller="sum_collective", dtypes=_DTYPES)
    _check_reachable()
    check_one_device_per_tower(devices, len(grads), caller="sum_collective")
    check_distinct(devices, caller="sum_collective")
    with tf.name_scope("sum_collective"):
        dense = [densify_column(own, caller="sum_collective") for own in columns(grads)]
        if grads.tests:
            # A step that fails on the way takes TensorFlow's collectives with it.
            dense = [after(column, devices, grads.tests) for column in dense]
        # An empty sum is at hand; sending it crashes TensorFlow.
        sent = [n for n, own in enumerate(dense) if own[0].shape.num_elements() != 0]
        sums = _reduce_all([dense[n] for n in sent], devices, keys, timeout_seconds)
    results = dict(enumerate(dense)) | dict(zip(sent, sums, strict=True))
    return rows([results[n] for n in range(len(dense))], len(grads))


def _check_reachable() -> None:
    # There TensorFlow has no collective executor for a function's operations.
    if builds_session_graph() and orders_effects():
        raise RuntimeError(
            "sum_collective: called in a tf.function that a session graph calls, in "
            "which TensorFlow runs no collectives. Call it in the graph itself, or use "
            "sum_balanced."
        )


def _reduce_all(
    dense: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str],
    keys: CollectiveKeys,
    timeout_seconds: float,
) -> list[list[tf.Tensor]]:
    group = keys.group(devices)
    instances = [keys.instance() for _ in dense]

    def reduce(n: int, column: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return _reduce(column, devices, (group, instances[n]), timeout_seconds)

    if not dense:
        return []
    lock = f"tw_reduce_{group}_{instances[0]}"
    return in_turn(reduce, dense, devices, lock=lock)


def _reduce(
    dense: Sequence[tf.Tensor],
    devices: Sequence[str],
    key: tuple[int, int],
    timeout_seconds: float,
) -> list[tf.Tensor]:
    is_filled = dense[0].shape.num_elements() is not None
    sums = []
    for tensor, device in zip(dense, devices, strict=True):
        with tf.device(device):
            # What may be empty is sent with one more element.
            sent = tensor if is_filled else join([tensor, tf.zeros([1], tensor.dtype)])
            total = _reduce_one(sent, len(devices), key, timeout_seconds)
            whole = total if is_filled else tf.reshape(total[:-1], tf.shape(tensor))
            sums.append(whole)
    return sums


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
