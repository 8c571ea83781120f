"""Checking, while training runs, the shapes that are not known while it is built.

A gradient that reads a placeholder, a ``py_function`` or a ``tf.function``'s free
dimension may have a shape that is known in part. What has another shape than its
variable would be added to other towers' as it lies, or shift what is packed behind it.
"""

import re
from typing import Any

import tensorflow as tf

from tw_core._variable_kinds import tf_variable
from tw_core.gradients._checks import check_are_pairs
from tw_core.gradients._lists import GradList
from tw_core.modes import without_autograph


@without_autograph
def ensure_gradient_shapes(grad_list: GradList) -> list[list[tuple[Any, Any]]]:
    """Gives every gradient the shape of its variable, checked when it is computed.

    Args:
      grad_list: [K][N] (gradient, variable) pairs, without None, that
        ``check_grad_list`` lets pass.

    Returns:
      The same pairs. A gradient whose shape is not fully known passes an op named
      after tower and variable, ``check_gradient_shape/tower1/w``, which fails with
      ``InvalidArgumentError`` where the shape is another. Of an ``IndexedSlices`` the
      rows are checked, in any number.

    Raises:
      TypeError: something that is no list of lists of pairs.
    """
    check_are_pairs(grad_list, "ensure_gradient_shapes")
    return [
        [(_ensured(grad, variable, tower=k), variable) for grad, variable in pairs]
        for k, pairs in enumerate(grad_list)
    ]


def _ensured(grad: Any, variable: Any, *, tower: int) -> Any:
    plain = tf_variable(variable)
    name = f"check_gradient_shape/tower{tower}/{plain.name.split(':')[0]}"
    if not isinstance(grad, tf.IndexedSlices):
        return _with_shape(grad, plain.shape, name)
    rows = tf.TensorShape([None]).concatenate(plain.shape[1:])
    values = _with_shape(grad.values, rows, name)
    return tf.IndexedSlices(values, grad.indices, grad.dense_shape)


def _with_shape(tensor: tf.Tensor, shape: tf.TensorShape, name: str) -> tf.Tensor:
    if str(tensor.shape.merge_with(shape)) == str(tensor.shape):
        return tensor  # The variable's shape tells nothing more.
    # On the gradient's device, whatever device is being built on.
    with tf.device(tensor.device or None):
        return tf.ensure_shape(
            tensor, shape, name=re.sub(r"[^A-Za-z0-9_.\\/-]", "_", name)
        )
