"""Checks of the (gradient, variable) pairs that ``apply_gradients`` takes.

Gradients travel flat and joined, and are split again by the shapes of the variables: a
longer gradient next to a shorter one would silently move elements from one variable to
another. A shape that is known while building is compared then; one that is known only
at run time is compared in each step, on the worker, before anything is sent.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tw_core.gradients import check_weight

_CALLER = "SyncReplicasOptimizer.apply_gradients"


def read_pairs(grads_and_vars: Any) -> list[tuple[Any, Any]]:
    """Returns the pairs of ``apply_gradients``, checked except for the gradients."""
    tensors = tf.Tensor | tf.IndexedSlices | tf.Variable
    if isinstance(grads_and_vars, str | tensors) or not isinstance(
        grads_and_vars, Iterable
    ):
        raise TypeError(
            f"{_CALLER}: grads_and_vars must be a list of (gradient, variable) pairs; "
            f"got {grads_and_vars!r}."
        )
    pairs = list(grads_and_vars)
    if not pairs:
        raise ValueError(
            f"{_CALLER}: Must supply at least one variable; got no (gradient, "
            "variable) pairs."
        )
    others = [p for p in pairs if not (isinstance(p, tuple | list) and len(p) == 2)]
    if others:
        raise TypeError(
            f"{_CALLER}: grads_and_vars must hold (gradient, variable) pairs; got "
            f"{', '.join(map(repr, others))}."
        )
    _check_resources([variable for _, variable in pairs])
    return [(grad, variable) for grad, variable in pairs]


def check_graph_of(pairs: Sequence[tuple[Any, Any]], global_step: Any) -> None:
    """Checks the global step, and that everything belongs to the default graph."""
    if global_step is None:
        raise ValueError(
            f"{_CALLER}: Global step is required to check staleness; got none, and the "
            "graph has none. Pass global_step="
            "tf.compat.v1.train.get_or_create_global_step(), or create it first."
        )
    _check_resources([global_step])
    if not global_step.dtype.is_integer or global_step.shape.rank != 0:
        raise ValueError(
            f"{_CALLER}: global_step must be a scalar of whole numbers; got "
            f"{global_step.name} of {global_step.dtype.name} and shape "
            f"{global_step.shape}."
        )
    graph = tf.compat.v1.get_default_graph()
    parts = [
        (variable.name, part)
        for grad, variable in [*pairs, (None, global_step)]
        for part in (grad, variable.handle)
        if isinstance(part, tf.Tensor | tf.IndexedSlices)
    ]
    # An eager tensor has no graph at all.
    others = [name for name, part in parts if getattr(part, "graph", None) is not graph]
    if others:
        raise ValueError(
            f"{_CALLER}: variables and gradients must belong to the default graph; got "
            f"others for {', '.join(dict.fromkeys(others))}."
        )


def check_own_weight(weight: Any, *, sparse_mean: str) -> None:
    """Checks the weight of this replica's gradients; accepts None."""
    if weight is None:
        return
    check_weight(weight)
    graph = tf.compat.v1.get_default_graph()
    if tf.is_tensor(weight) and getattr(weight, "graph", None) is not graph:
        raise ValueError(
            f"{_CALLER}: weight must belong to the default graph; got {weight!r}."
        )
    if sparse_mean == "per_row":
        raise ValueError(
            f"{_CALLER}: weight is that of a mean over replicas; with "
            "sparse_mean='per_row' each row counts replicas. Use 'replicas'."
        )


def fitting_gradients(pairs: Sequence[tuple[Any, tf.Variable]]) -> list[Any]:
    """Checks [N] gradients against their variables; unknown shapes, in each step."""
    _check_kinds(pairs)
    unknown = [v.name for _, v in pairs if not v.shape.is_fully_defined()]
    if unknown:
        raise ValueError(
            f"{_CALLER}: variables must have fully known shapes; got "
            f"{', '.join(unknown)} without."
        )
    misfits = [_misfit(grad, variable) for grad, variable in pairs if grad is not None]
    found = [misfit for misfit in misfits if misfit]
    if found:
        raise ValueError(
            f"{_CALLER}: a gradient must have the shape of its variable; got "
            f"{'; '.join(found)}."
        )
    return [_checked_in_step(grad, variable) for grad, variable in pairs]


def _check_resources(variables: Sequence[Any]) -> None:
    others = [
        str(getattr(variable, "name", variable))
        for variable in variables
        if not hasattr(variable, "handle")
    ]
    if others:
        raise TypeError(
            f"{_CALLER}: only resource variables are supported; got "
            f"{', '.join(others)}. Call tf.compat.v1.enable_resource_variables() "
            "before building the model; of a Keras variable, pass its value."
        )


def _check_kinds(pairs: Sequence[tuple[Any, tf.Variable]]) -> None:
    others = [
        f"{variable.name}: {type(grad).__name__}"
        for grad, variable in pairs
        if not (grad is None or isinstance(grad, tf.Tensor | tf.IndexedSlices))
    ]
    if others:
        raise TypeError(
            f"{_CALLER}: a gradient must be a tf.Tensor, tf.IndexedSlices or None; got "
            f"{', '.join(others)}."
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


def _misfit(grad: Any, variable: tf.Variable) -> str | None:
    """Describes a known mismatch in a gradient's shape."""
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


def _checked_in_step(grad: Any, variable: tf.Variable) -> Any:
    """Returns a gradient that fails in a step in which its shape does not fit."""
    shape = variable.shape
    if grad is None:
        return None
    if isinstance(grad, tf.Tensor):
        return _must_have(grad, list(shape), shape, variable)
    indices = _must_have(grad.indices, [-1], tf.TensorShape([None]), variable)
    known = grad.indices.shape.concatenate(shape[1:])
    sizes = [tf.shape(indices)[0], *shape[1:]]
    values = _must_have(grad.values, sizes, known, variable)
    return tf.IndexedSlices(values, indices, grad.dense_shape)


def _must_have(
    tensor: tf.Tensor, expected: Sequence[Any], known: tf.TensorShape, variable: Any
) -> tf.Tensor:
    """Compares a shape in each step, unless known to fit; -1 expects any size."""
    if tensor.shape == known and (known.is_fully_defined() or expected == [-1]):
        return tensor
    rank = len(expected)
    with tf.device(tensor.device):
        # One number more than expected, so that a different rank fails too.
        sizes = tf.concat([tf.shape(tensor), tf.fill([rank + 1], -2)], axis=0)
        sizes, expected = sizes[: rank + 1], tf.stack([*expected, -2])
        fits = tf.reduce_all(tf.equal(sizes, expected) | tf.equal(expected, -1))
        message = (
            f"{_CALLER}: a gradient must have the shape of its variable, "
            f"{variable.name} of {variable.shape}; got "
        )
        compared = tf.debugging.Assert(fits, [message, tf.shape(tensor)], rank + 1)
        with tf.control_dependencies([compared]):
            return tf.ensure_shape(tensor, known)
