"""All-reduce by collective ops, one op per device and gradient.

``sum_collective`` uses TensorFlow's own. The first version of the op is used on
purpose: the second one deadlocks in a ``tf.function`` unless ordered by tokens, the
third crashes on CPUs. On CPUs this is several times slower than adding; it is for
devices with their own links, and for tensors too large to gather in one place. In a
``tf.function`` whose towers each own a GPU it asks TensorFlow for NCCL.

``sum_nccl`` uses NVIDIA's NCCL, for towers that each own a GPU.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_core.devices import canonical_device
from tw_core.internal import (
    Gradients,
    builds_session_graph,
    check_number,
    elementwise,
    join_flat,
    orders_effects,
    read_gradients,
    without_autograph,
)
from tw_reduce._checks import (
    check_addable,
    check_device_strings,
    check_devices,
    check_distinct,
    positions_of,
)
from tw_reduce._reducer import TowerTensors, rows
from tw_reduce._sums.arrivals import note_all
from tw_reduce._sums.one_device import densify_column
from tw_reduce._sums.rendezvous import (
    CollectiveKeys,
    after,
    all_together,
    check_keys,
    check_traced,
    in_turn,
    plan_reduction,
)

NCCL_DTYPES = ("float16", "float32", "float64", "int32", "int64")
COLLECTIVE_DTYPES = ("bfloat16", *NCCL_DTYPES)
# TensorFlow's collectives do not add these on GPUs.
_WIDER_ON_GPUS = {tf.bfloat16: tf.float32, tf.int32: tf.int64}
_ALTERNATIVES = (
    "On other devices use sum_balanced, hierarchical(groups) or sum_collective "
    "(by mode: 'cpu', 'gpu', 'hierarchical' or 'collective')."
)


@elementwise
@without_autograph
def sum_collective(
    grads: TowerTensors,
    *,
    devices: Sequence[str],
    keys: CollectiveKeys,
    timeout_s: float | None = None,
) -> list[list[tf.Tensor]]:
    """Adds the gradients of all towers in a ring over their devices.

    A reduction waits until all towers have joined. Using any result makes all
    towers join with all of their gradients. Only a gradient that never arrives, or a
    step that runs in parts, can still keep a tower away forever: ``keys.bounded`` then
    ends the call that runs the step, and names the tower. After a timeout TensorFlow
    refuses collectives: in a session until it is closed, in a ``tf.function`` until the
    process ends.

    In a ``tf.function`` whose towers each have their own GPU, TensorFlow uses NCCL for
    the dtypes that it can add; never in session graphs, where NCCL has returned wrong
    sums (tensorflow#62493).

    Several threads may run the step at the same time: they reduce one at a time,
    each once all of its gradients are ready.

    Args:
      grads: [K][N]; ``IndexedSlices`` become dense, for which one tower's must
        know its ``dense_shape``.
      devices: [K] the towers' devices, all distinct.
      keys: the caller's; one object for all reducers of the process.
      timeout_s: seconds that one reduction may take, once all gradients are ready,
        before the step fails; None for no bound. TensorFlow then keeps a sleeping
        thread per tower and reduction until the bound has passed, even after the
        reduction; so pack, and choose a few seconds.

    Returns:
      [K][N] sums, not means, each tower's on its device. A single tower's
      gradients are returned unchanged.

    Raises:
      ValueError: a bad list of gradients; devices that are not one per tower,
        distinct and known; an ``IndexedSlices`` of unknown dense shape; a
        ``timeout_s`` of 0 or less.
      TypeError: something that is not a tensor; a dtype that collectives do not
        add; ``keys`` that are not a CollectiveKeys.
      RuntimeError: called eagerly, in a ``jit_compile=True`` function, or in a
        ``tf.function`` that a session graph calls.
    """
    grads = read_gradients(grads)
    check_keys(keys)
    if timeout_s is not None:
        check_number(timeout_s=timeout_s, above=0)
    if len(grads) == 1:
        return [list(grads[0])]
    check_traced()
    check_addable(grads, dtypes=COLLECTIVE_DTYPES)
    # There, TensorFlow has no collective executor for a function's operations.
    if builds_session_graph() and orders_effects():
        raise RuntimeError(
            "sum_collective: called in a tf.function that a session graph calls, in "
            "which TensorFlow runs no collectives. Call it in the graph itself, or use "
            "sum_balanced."
        )
    devices = check_device_strings(devices)
    check_devices(devices, num_towers=len(grads))
    check_distinct(devices)
    with tf.name_scope("sum_collective"):
        dense = _dense_columns(grads, devices)
        # An empty sum is known without sending, which would crash TensorFlow.
        sent = [n for n, own in enumerate(dense) if own[0].shape.num_elements() != 0]
        sums = _reduce_in_turn([dense[n] for n in sent], devices, keys, timeout_s or 0)
    results = dict(enumerate(dense)) | dict(zip(sent, sums, strict=True))
    return rows([results[n] for n in range(len(dense))], len(grads))


@elementwise
@without_autograph
def sum_nccl(
    grads: TowerTensors, *, devices: Sequence[str], keys: CollectiveKeys
) -> list[list[tf.Tensor]]:
    """Adds the gradients of all towers over the GPUs' own links.

    A reduction waits until all towers have joined. Using any tower's result
    makes all of them join. ``keys.bounded`` ends the call of a step in which one does
    not; in a ``tf.function`` it names the tower.

    Args:
      grads: [K][N] of float16, float32, float64, int32 or int64;
        ``IndexedSlices`` become dense, for which one tower's must know its
        ``dense_shape``.
      devices: [K] the towers' GPUs, all distinct.
      keys: the caller's; one object for all reducers of the process.

    Returns:
      [K][N] sums, not means, each tower's on its GPU. A single tower's
      gradients are returned unchanged.

    Raises:
      ValueError: a bad list of gradients; devices that are not one GPU per
        tower, distinct and present; a dtype NCCL cannot add.
      TypeError: something that is not a tensor.
      RuntimeError: called eagerly, or in a ``jit_compile=True`` function.
    """
    grads = read_gradients(grads)
    check_keys(keys)
    if len(grads) == 1:
        return [list(grads[0])]
    check_traced()
    devices = check_one_gpu_per_tower(devices, len(grads))
    if unfit := positions_of(grads, lambda dtype: dtype.name not in NCCL_DTYPES):
        raise ValueError(
            f"sum_nccl: NCCL adds {', '.join(NCCL_DTYPES)}; got others at positions "
            f"{unfit}. Wrap it in accumulate_as(sum_nccl, tf.float32), or use "
            "sum_balanced."
        )
    with tf.name_scope("sum_nccl"):
        # TensorFlow matches them by shared name and by the number of the run.
        dense = _dense_columns(grads, devices)
        sums = [
            _reduce_by_nccl(column, devices, f"tw_reduce_{keys.instance()}")
            for column in dense
        ]
        if orders_effects():  # Elsewhere nothing would run the notes.
            reduction = plan_reduction(
                keys, f"sum_nccl of {len(dense)} gradients", devices
            )
            note_all(reduction, dense, sums)
    return rows(sums, len(grads))


def check_one_gpu_per_tower(devices: Sequence[str], num_towers: int) -> list[str]:
    """Names devices; refuses those that NCCL cannot serve, naming alternatives.

    Devices of another job are assumed to exist.
    """
    devices = check_device_strings(devices)
    specs = [tf.DeviceSpec.from_string(canonical_device(device)) for device in devices]
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
    check_devices(devices, num_towers=num_towers)
    check_distinct(devices)
    num_gpus = len(tf.config.get_visible_devices("GPU"))
    if all(spec.job is None for spec in specs) and num_gpus < num_towers:
        raise ValueError(
            f"sum_nccl: NCCL needs a GPU for each tower; got {num_towers} towers on "
            f"{num_gpus}. {_ALTERNATIVES}"
        )
    return devices


def _dense_columns(grads: Gradients, devices: Sequence[str]) -> list[list[tf.Tensor]]:
    dense = [densify_column(column) for column in zip(*grads, strict=True)]
    if not grads.tests:
        return dense
    # A step that fails midway breaks TensorFlow's collectives.
    return [after(column, devices, grads.tests) for column in dense]


def _reduce_in_turn(
    dense: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str],
    keys: CollectiveKeys,
    timeout_s: float,
) -> list[list[tf.Tensor]]:
    group = keys.group(devices)
    instances = [keys.instance() for _ in dense]

    hints = [_hint(column[0].dtype, devices) for column in dense]
    # NCCL's reductions start in one order on all devices.
    before = [
        [instances[m] for m in range(n - 1, -1, -1) if hints[m] == hints[n]][:1]
        for n in range(len(dense))
    ]

    def reduce(n: int, column: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        order = {"wait_for": before[n]} if hints[n] == "nccl" else {}
        carried = {"communication_hint": hints[n], **order}
        return _reduce(column, devices, (group, instances[n]), timeout_s, carried)

    if not dense:
        return []
    lock = f"tw_reduce_{group}_{instances[0]}"
    reduction = plan_reduction(
        keys, f"sum_collective of {len(dense)} gradients", devices
    )
    return in_turn(reduce, dense, devices, lock=lock, reduction=reduction)


def _reduce(
    dense: Sequence[tf.Tensor],
    devices: Sequence[str],
    key: tuple[int, int],
    timeout_s: float,
    carried: dict[str, Any],
) -> list[tf.Tensor]:
    is_filled = dense[0].shape.num_elements() is not None
    dtype = sent_as = dense[0].dtype
    if any("GPU" in canonical_device(device) for device in devices):
        sent_as = _WIDER_ON_GPUS.get(dtype, dtype)
    sums = []
    for tensor, device in zip(dense, devices, strict=True):
        with tf.device(device):
            # A tensor that may be empty is sent with one extra element.
            filled = [] if is_filled else [tf.zeros([1], tensor.dtype)]
            sent = tf.cast(join_flat([tensor, *filled]) if filled else tensor, sent_as)
            total = tf.raw_ops.CollectiveReduce(
                input=sent,
                group_size=len(devices),
                group_key=key[0],
                instance_key=key[1],
                merge_op="Add",
                final_op="Id",
                subdiv_offsets=[0],
                timeout_seconds=timeout_s,
                **carried,
            )
            total = tf.cast(total, dtype)
            whole = total if is_filled else tf.reshape(total[:-1], tf.shape(tensor))
            sums.append(whole)
    return sums


def _hint(dtype: tf.DType, devices: Sequence[str]) -> str:
    """Returns the communication hint for a dtype: "nccl" where it works, or "auto"."""
    can = (
        dtype.name in NCCL_DTYPES
        and orders_effects()
        and all("GPU" in canonical_device(device) for device in devices)
        and len(tf.config.get_visible_devices("GPU")) >= len(devices)
        and tf.sysconfig.get_build_info().get("is_cuda_build")
    )
    return "nccl" if can else "auto"


def _reduce_by_nccl(
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
