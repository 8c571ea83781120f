"""All towers' gradients as buffers, by one plan for all of them."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tw_ampopt._checks.arguments import check_dtypes
from tw_ampopt._update.buffer_plan import BufferPlan, plan_buffers
from tw_ampopt._update.buffers import Buffer, pack
from tw_ampopt._update.clean import clean_gradient

# [K][N][calls]: what each call of a tower gave for a variable.
RawGradients: TypeAlias = Sequence[Sequence[Sequence[Buffer | None]]]
Shapes: TypeAlias = Sequence[tuple[int, ...]]


def tower_buffers(
    grads: RawGradients, shapes: Shapes, devices: Sequence[str], *, keep_sparse: bool
) -> tuple[BufferPlan, list[list[Buffer]]]:
    """Cleans and packs gradients, each tower's on its own device.

    Args:
      grads: [K][N][calls] gradients.
      shapes: [N] shapes of the variables.
      devices: [K] devices.
      keep_sparse: whether gradients that are sparse in every tower may stay alone
        to stay sparse; else the plan is the one for dense gradients.

    Returns:
      The plan, and [K][M] float32 buffers by it.
    """
    clean = []
    for device, tower in zip(devices, grads, strict=True):
        with tf.device(device or None):
            clean.append(list(map(clean_gradient, tower, shapes)))
    sparse = _sparse_everywhere(clean)
    plan = plan_buffers(shapes, sparse=sparse if keep_sparse else None)
    buffers = []
    for device, own in zip(devices, clean, strict=True):
        with tf.device(device or None):
            buffers.append(pack(plan, _densify_where_not(sparse, own)))
    return plan, buffers


def known_shapes(variables: Sequence[Any], *, caller: str) -> list[tuple[int, ...]]:
    """Returns the shapes of [N] variables.

    Raises:
      TypeError: variables that are not floating.
      ValueError: shapes that are not fully known.
    """
    check_dtypes(variables, caller=caller)
    shapes = [tf.TensorShape(variable.shape) for variable in variables]
    unknown = [
        f"{variable.name} {shape}"
        for variable, shape in zip(variables, shapes, strict=True)
        if not shape.is_fully_defined()
    ]
    if unknown:
        raise ValueError(
            f"{caller}: variables must have known shapes, as slots and accumulators "
            f"have theirs; got {', '.join(unknown)}. Make them with a full shape."
        )
    return [tuple(shape.as_list()) for shape in shapes]


def _sparse_everywhere(towers: Sequence[Sequence[Buffer]]) -> list[bool]:
    return [
        all(isinstance(grad, tf.IndexedSlices) for grad in column)
        for column in zip(*towers, strict=True)
    ]


def _densify_where_not(sparse: Sequence[bool], tower: Sequence[Buffer]) -> list[Buffer]:
    return [
        grad if stays else tf.convert_to_tensor(grad)
        for grad, stays in zip(tower, sparse, strict=True)
    ]
