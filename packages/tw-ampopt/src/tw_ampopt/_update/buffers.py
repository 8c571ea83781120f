"""Gradients made uniform and joined.

Each variable's gradient is averaged over the calls that list it, in float32, or in
float64 if that is the variable's dtype; a call whose loss does not depend on it counts
as zero. Small gradients are then joined, so that adding, reducing and testing them take
one kernel each. Large ones stay alone: joining them would copy the model once more.
Sparse ones stay alone to stay sparse.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, TypeAlias

import tensorflow as tf

from tw_core.internal import (
    PackPlan,
    call_once,
    is_finite,
    join_rows,
    map_values,
    pack_tensors,
    plan_packing,
    scale,
    weight_dtype,
)

Buffer: TypeAlias = tf.Tensor | tf.IndexedSlices
# [K][N][calls]: the gradient from each call of a tower for each variable.
RawGradients: TypeAlias = Sequence[Sequence[Sequence[Buffer | None]]]

JOIN_UP_TO = 16_384  # elements; below it a kernel's overhead outweighs a copy


def plan_buffers(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[tf.DType] = (),  # by default all equal
    *,
    sparse: Sequence[bool] | None = None,
) -> PackPlan:
    """Decides which gradients are joined.

    >>> plan_buffers([(2,), (100_000,), ()])
    PackPlan(packs=((0, 2),), alone=(1,))
    """
    stays = [False] * len(shapes) if sparse is None else sparse
    keys = [dtype.name for dtype in dtypes] or ["small"] * len(shapes)
    return plan_packing(
        [
            key if not is_sparse and prod(shape) <= JOIN_UP_TO else None
            for key, shape, is_sparse in zip(keys, shapes, stays, strict=True)
        ]
    )


def buffer_specs(specs: Sequence[tf.TensorSpec]) -> list[tf.TensorSpec]:
    """Returns the shapes and dtypes of a tower's [M] buffers."""
    shapes, dtypes = [own.shape for own in specs], [own.dtype for own in specs]
    plan = plan_buffers(shapes, dtypes)
    of_buffers = [*(pack[0] for pack in plan.packs), *plan.alone]
    return [
        tf.TensorSpec(shape, dtypes[n])
        for n, shape in zip(of_buffers, plan.packed_shapes(shapes), strict=True)
    ]


def make_buffers(
    grads: RawGradients,
    specs: Sequence[tf.TensorSpec],
    devices: Sequence[str],
    *,
    keep_sparse: bool,
) -> tuple[PackPlan, list[list[Buffer]]]:
    """Joins gradients by one plan, into [K][M] buffers on towers' devices."""
    clean = on_devices(devices, partial(clean_gradients, specs), grads)
    sparse = [
        all(isinstance(grad, tf.IndexedSlices) for grad in column)
        for column in zip(*clean, strict=True)
    ]
    plan = plan_buffers(
        [own.shape for own in specs],
        [own.dtype for own in specs],
        sparse=sparse if keep_sparse else None,
    )
    may_stay = {n for n in plan.alone if sparse[n]}

    def packed(tower: Sequence[Buffer]) -> list[Buffer]:
        own = [
            grad if n in may_stay else tf.convert_to_tensor(grad)
            for n, grad in enumerate(tower)
        ]
        return pack_tensors(own, plan)

    return plan, on_devices(devices, packed, clean)


def clean_gradients(
    specs: Sequence[tf.TensorSpec], tower: Sequence[Sequence[Buffer | None]]
) -> list[Buffer]:
    """Returns one tower's [N] gradients, averaged over calls."""
    return list(map(_mean_of_calls, tower, specs))


def to_wide(grad: Buffer, dtype: tf.DType | None = None) -> Buffer:
    """Casts a gradient, by default to float64 if it has that dtype, else float32."""
    dtype = weight_dtype([grad]) if dtype is None else dtype
    return map_values(partial(tf.cast, dtype=dtype), grad)


def sum_of_calls(grads: Sequence[Buffer]) -> Buffer:
    """Adds gradients; the sum is sparse if all of them are."""
    if all(isinstance(grad, tf.IndexedSlices) for grad in grads):
        return join_rows(grads)
    return tf.add_n([tf.convert_to_tensor(grad) for grad in grads])


def nonfinite_flags(grads: RawGradients, devices: Sequence[str]) -> tf.Tensor:
    """Returns [K, N] bool: which gradients have an element that is not finite."""
    rows = on_devices(devices, lambda own: tf.stack(list(map(_is_bad, own))), grads)
    return tf.stack(rows)


def on_devices(
    devices: Sequence[str],
    fn: Callable[..., Any],
    *towers: Sequence[Any],
    once: bool | None = None,
    jit_compile: bool = False,
) -> list[Any]:
    """Calls a function for each of K towers, on the tower's device.

    ``once`` traces it for the first tower alone, by default if XLA compiles it.
    """
    scopes = [partial(tf.device, device or None) for device in devices]
    items = list(zip(*towers, strict=True))
    if len(items) > 1 and (jit_compile if once is None else once):
        return call_once(fn, items, scopes, jit_compile=jit_compile)
    results = []
    for scope, own in zip(scopes, items, strict=True):
        if jit_compile:  # It may write variables that only its optimizer has.
            results += call_once(fn, [own], [scope], outside="", jit_compile=True)
        else:
            with scope():
                results.append(fn(*own))
    return results


def _mean_of_calls(calls: Sequence[Buffer | None], spec: tf.TensorSpec) -> Buffer:
    reached = [to_wide(grad, spec.dtype) for grad in calls if grad is not None]
    if not reached:
        return tf.zeros(spec.shape, spec.dtype)
    if len(calls) == 1:
        return reached[0]
    return scale(sum_of_calls(reached), 1.0 / len(calls))


def _is_bad(calls: Sequence[Buffer | None]) -> tf.Tensor:
    finite = [is_finite(grad) for grad in calls if grad is not None]
    return tf.logical_not(tf.reduce_all(tf.stack([tf.constant(True), *finite])))
