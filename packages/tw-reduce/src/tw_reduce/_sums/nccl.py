"""All-reduce by NVIDIA's NCCL, for towers that each own a GPU.

One op per GPU and gradient, which find each other by a shared name.
"""

from collections.abc import Sequence

import tensorflow as tf

import tw_core
from tw_core import without_autograph
from tw_reduce._checked_towers import checked_towers
from tw_reduce._devices import (
    check_device_strings,
    check_distinct,
    check_one_device_per_tower,
)
from tw_reduce._reducer import (
    TowerTensors,
    columns,
    rows,
)
from tw_reduce._sums.collective_keys import CollectiveKeys, check_keys
from tw_reduce._sums.joint_barrier import after, all_together, check_traced
from tw_reduce._sums.sparse import densify_column

NCCL_DTYPES = ("float16", "float32", "float64", "int32", "int64")
_ALTERNATIVES = (
    "On other devices use sum_balanced, hierarchical(groups) or sum_collective "
    "(by mode: 'cpu', 'gpu', 'hierarchical' or 'collective')."
)


@without_autograph
def sum_nccl(
    grads: TowerTensors, *, devices: Sequence[str], keys: CollectiveKeys
) -> list[list[tf.Tensor]]:
    """Adds the gradients of all towers over the GPUs' own links.

    A reduction waits until all towers have joined. Using any tower's result
    makes all of them join.

    Args:
      grads: [K][N] of float16, float32, float64, int32 or int64;
        ``IndexedSlices`` become dense, for which one tower's must know its
        ``dense_shape``.
      devices: [K] the towers' GPUs, no two alike.
      keys: the caller's; one object for all reducers of the process.

    Returns:
      [K][N] sums, not means, each tower's on its GPU. One tower is returned as
      it is.

    Raises:
      ValueError: a bad list of gradients; devices that are not one GPU a
        tower, distinct and present; a dtype NCCL cannot add.
      TypeError: something that is no tensor.
      RuntimeError: called eagerly, or in a ``jit_compile=True`` function.
    """
    grads = checked_towers(grads, caller="sum_nccl")
    check_keys(keys, caller="sum_nccl")
    if len(grads) == 1:
        return [list(grads[0])]
    check_traced(caller="sum_nccl")
    check_one_gpu_per_tower(devices, len(grads))
    _check_dtypes(grads)
    with tf.name_scope("sum_nccl"):
        dense = [densify_column(own, caller="sum_nccl") for own in columns(grads)]
        if grads.tests:
            dense = [after(column, devices, grads.tests) for column in dense]
        sums = [
            _reduce(column, devices, f"tw_reduce_{keys.instance()}") for column in dense
        ]
    return rows(sums, len(grads))


def check_one_gpu_per_tower(devices: Sequence[str], num_towers: int) -> None:
    """Refuses devices that NCCL cannot serve, and names what can.

    Args:
      devices: the towers'. Those of another job are taken to be there.
      num_towers: K.

    Raises:
      ValueError: not one a tower, not GPUs, not distinct, or not there.
    """
    check_device_strings(devices, caller="sum_nccl")
    specs = [
        tf.DeviceSpec.from_string(tw_core.canonical_device(device))
        for device in devices
    ]
    others = [
        device
        for device, spec in zip(devices, specs, strict=True)
        if spec.device_type != "GPU"
    ]
    if others:
        raise ValueError(
            f"sum_nccl: NCCL adds between GPUs only; got {others}. {_ALTERNATIVES}"
        )
    here = any(spec.job is None for spec in specs)
    if here and not tf.config.get_visible_devices("GPU"):
        raise ValueError(
            f"sum_nccl: this process has no GPU; got {list(devices)}. {_ALTERNATIVES}"
        )
    check_one_device_per_tower(devices, num_towers, caller="sum_nccl")
    check_distinct(devices, caller="sum_nccl")


def _check_dtypes(grads: TowerTensors) -> None:
    unfit = [
        f"{n} ({tensor.dtype.name})"
        for n, tensor in enumerate(grads[0])
        if tensor.dtype.name not in NCCL_DTYPES
    ]
    if unfit:
        raise ValueError(
            f"sum_nccl: NCCL adds {', '.join(NCCL_DTYPES)}; got others at positions "
            f"{', '.join(unfit)}. Wrap it in reduce_as(sum_nccl, tf.float32), or use "
            "sum_balanced."
        )


def _reduce(
    dense: Sequence[tf.Tensor], devices: Sequence[str], shared_name: str
) -> list[tf.Tensor]:
    sums = []
    for tensor, device in zip(dense, devices, strict=True):
        with tf.device(device):
            total = tf.raw_ops.NcclAllReduce(
                input=tensor,
                reduction="sum",
                num_devices=len(devices),
                shared_name=shared_name,
            )
        sums.append(total)
    return all_together(sums, devices)
