"""Whether gradients fit their variables: told while building where that is known.

Gradients travel flat, joined with others, and are cut apart again by the shapes of the
variables: a longer gradient beside a shorter one would move elements from one variable
to another, and nobody would notice. A shape that is known in a run only is compared in
each step, on the worker, before anything is sent.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_CALLER = "SyncReplicasOptimizer.apply_gradients"


def fitting_gradients(
    grads: Sequence[Any], variables: Sequence[tf.Variable]
) -> list[Any]:
    """Checks gradients against their variables.

    Args:
      grads: [N] dense, sparse or None.
      variables: [N] they belong to.

    Returns:
      [N] gradients; of those whose shape is not known yet, ones that fail in a step
      where it does not fit.

    Raises:
      TypeError: a gradient is of another kind, or of another dtype than its variable;
        all are named.
      ValueError: a variable's shape is not known, or a gradient's does not fit; all
        are named.
    """
    pairs = list(zip(grads, variables, strict=True))
    _check_kinds(pairs)
    _check_variables(variables)
    misfits = [_misfit(grad, variable) for grad, variable in pairs if grad is not None]
    found = [misfit for misfit in misfits if misfit]
    if found:
        raise ValueError(
            f"{_CALLER}: a gradient must have the shape of its variable; got "
            f"{'; '.join(found)}."
        )
    return [_compared_in_a_step(grad, variable) for grad, variable in pairs]


def _check_kinds(pairs: Sequence[tuple[Any, tf.Variable]]) -> None:
    strange = [
        f"{variable.name}: {type(grad).__name__}"
        for grad, variable in pairs
        if not (grad is None or isinstance(grad, tf.Tensor | tf.IndexedSlices))
    ]
    if strange:
        raise TypeError(
            f"{_CALLER}: a gradient must be a tf.Tensor, tf.IndexedSlices or None; got "
            f"{', '.join(strange)}."
        )
    others = [
        f"{grad.dtype.name} for {variable.name} ({variable.dtype.base_dtype.name})"
        for grad, variable in pairs
        if grad is not None and grad.dtype != variable.dtype.base_dtype
    ]
    if others:
        raise TypeError(
            f"{_CALLER}: a gradient must have the dtype of its variable; got "
            f"{', '.join(others)}. Cast it; for narrower transfers pass compression=."
        )


def _check_variables(variables: Sequence[tf.Variable]) -> None:
    unknown = [v.name for v in variables if not v.shape.is_fully_defined()]
    if unknown:
        raise ValueError(
            f"{_CALLER}: variables must have fully known shapes; these have not: "
            f"{', '.join(unknown)}."
        )


def _misfit(grad: Any, variable: tf.Variable) -> str | None:
    """Tells what is known to be wrong with a gradient's shape."""
    shape = variable.shape
    if not isinstance(grad, tf.IndexedSlices):
        if grad.shape.is_compatible_with(shape):
            return None
        return f"{grad.shape} for {variable.name} of {shape}"
    rows = grad.indices.shape.concatenate(shape[1:])
    fits = shape.rank and grad.indices.shape.is_compatible_with([None])
    if fits and grad.values.shape.is_compatible_with(rows):
        return None
    return (
        f"values {grad.values.shape} at indices {grad.indices.shape} for "
        f"{variable.name} of {shape}"
    )


def _compared_in_a_step(grad: Any, variable: tf.Variable) -> Any:
    """Returns a gradient that fails in a step where its shape does not fit."""
    shape = variable.shape
    if grad is None:
        return None
    if isinstance(grad, tf.Tensor):
        return _must_have(grad, list(shape), shape, variable)
    indices = _must_have(grad.indices, [-1], tf.TensorShape([None]), variable)
    known = grad.indices.shape.concatenate(shape[1:])
    wanted = [tf.shape(indices)[0], *shape[1:]]
    values = _must_have(grad.values, wanted, known, variable)
    return tf.IndexedSlices(values, indices, grad.dense_shape)


def _must_have(
    tensor: tf.Tensor, wanted: Sequence[Any], known: tf.TensorShape, variable: Any
) -> tf.Tensor:
    """Compares a shape in each step, unless it is the one wanted for certain.

    Args:
      tensor: part of a gradient.
      wanted: sizes, numbers or int32 []; -1 for any.
      known: what is known of them.
      variable: to be named.
    """
    if tensor.shape == known and (known.is_fully_defined() or wanted == [-1]):
        return tensor
    rank = len(wanted)
    with tf.device(tensor.device):
        # One number more than wanted, so that another rank is a difference too.
        sizes = tf.concat([tf.shape(tensor), tf.fill([rank + 1], -2)], axis=0)
        sizes, wanted = sizes[: rank + 1], tf.stack([*wanted, -2])
        fits = tf.reduce_all(tf.equal(sizes, wanted) | tf.equal(wanted, -1))
        message = (
            f"{_CALLER}: a gradient must have the shape of its variable, "
            f"{variable.name} of {variable.shape}; got "
        )
        compared = tf.debugging.Assert(fits, [message, tf.shape(tensor)], rank + 1)
        with tf.control_dependencies([compared]):
            return tf.ensure_shape(tensor, known)
