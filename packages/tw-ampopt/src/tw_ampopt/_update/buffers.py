"""Gradients into buffers and back, on the device in force."""

from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from tw_ampopt._update.buffer_plan import BufferPlan

Buffer: TypeAlias = tf.Tensor | tf.IndexedSlices


def pack(plan: BufferPlan, grads: Sequence[Buffer]) -> list[Buffer]:
    """Makes the M buffers of a plan.

    Args:
      plan: what goes where.
      grads: [N] gradients of one tower; those that are packed may be sparse.

    Returns:
      [M] buffers; a packed one is flat.
    """
    alone = [grads[n] for n in plan.alone]
    if not plan.packed:
        return alone
    flat = [_flatten(grads[n], plan.shapes[n]) for n in plan.packed]
    return [tf.concat(flat, axis=0), *alone]


def unpack(plan: BufferPlan, buffers: Sequence[Buffer]) -> list[Buffer]:
    """Undoes ``pack``.

    Args:
      plan: the plan the buffers were made by.
      buffers: [M] buffers.

    Returns:
      [N] gradients.
    """
    grads: dict[int, Buffer] = {}
    if plan.packed:
        parts = tf.split(buffers[0], list(plan.sizes))
        for n, part in zip(plan.packed, parts, strict=True):
            shape = plan.shapes[n]
            grads[n] = part if len(shape) == 1 else tf.reshape(part, shape)
        buffers = buffers[1:]
    grads.update(zip(plan.alone, buffers, strict=True))
    return [grads[n] for n in range(len(plan.shapes))]


def scaled(buffer: Buffer, factor: tf.Tensor | None) -> Buffer:
    """Multiplies a buffer, sparse or not, by a float32 scalar; None leaves it."""
    if factor is None:
        return buffer
    if isinstance(buffer, tf.IndexedSlices):
        return tf.IndexedSlices(
            buffer.values * factor, buffer.indices, buffer.dense_shape
        )
    return buffer * factor


def divided(buffer: Buffer, divisor: tf.Tensor | None) -> Buffer:
    """Divides a buffer, sparse or not, by a float32 scalar; None leaves it.

    Multiplying by an inverse would round twice unless the divisor is a power of two.
    """
    if divisor is None:
        return buffer
    if isinstance(buffer, tf.IndexedSlices):
        return tf.IndexedSlices(
            buffer.values / divisor, buffer.indices, buffer.dense_shape
        )
    return buffer / divisor


def _flatten(grad: Buffer, shape: tuple[int, ...]) -> tf.Tensor:
    dense = tf.convert_to_tensor(grad)
    return dense if len(shape) == 1 else tf.reshape(dense, [-1])
