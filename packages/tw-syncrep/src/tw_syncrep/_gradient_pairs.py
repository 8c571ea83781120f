"""Checks of the (gradient, variable) pairs that ``apply_gradients`` takes.

Static shapes are compared while the graph is built; dynamic ones in each step, on the
worker, before anything is sent.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_core.internal import check_weight, ensure_gradient_shapes, list_pairs
from tw_syncrep._parameters.cache import with_masters


def read_gradients(
    grads_and_vars: Any, global_step: Any, *, weight: Any, sparse_mean: str
) -> tuple[list[Any], list[tf.Variable]]:
    """Returns [N] gradients and [N] variables; parameters in place of their copies."""
    given = _read_pairs(grads_and_vars)
    _check_resources([variable for _, variable in given])
    pairs = with_masters(given)
    _check_step(global_step)
    _check_graph([*pairs, (None, global_step)])
    _check_weight(weight, sparse_mean)
    _check_gradients(pairs)
    [ensured] = ensure_gradient_shapes([pairs])
    grads = [_with_a_row_per_index(grad, variable) for grad, variable in ensured]
    return grads, [variable for _, variable in pairs]


def _read_pairs(grads_and_vars: Any) -> list[tuple[Any, Any]]:
    pairs = list_pairs("grads_and_vars", grads_and_vars)
    if not pairs:
        raise ValueError(
            "Must supply at least one variable; got no (gradient, variable) pairs."
        )
    return pairs


def _check_step(global_step: Any) -> None:
    if global_step is None:
        raise ValueError(
            "Global step is required to check staleness; got none, and the graph has "
            "none. Pass global_step=tf.compat.v1.train.get_or_create_global_step(), or "
            "create it first."
        )
    _check_resources([global_step])
    if not global_step.dtype.is_integer or global_step.shape.rank != 0:
        raise ValueError(
            f"global_step must be an integer scalar; got {global_step.name} of "
            f"{global_step.dtype.name} and shape {global_step.shape}."
        )


def _check_graph(pairs: Sequence[tuple[Any, Any]]) -> None:
    graph = tf.compat.v1.get_default_graph()
    # Eager tensors have no graph.
    others = [
        variable.name
        for grad, variable in pairs
        for part in (grad, variable.handle)
        if isinstance(part, tf.Tensor | tf.IndexedSlices)
        and getattr(part, "graph", None) is not graph
    ]
    if others:
        raise ValueError(
            "Variables and gradients must belong to the default graph; got others for "
            f"{', '.join(dict.fromkeys(others))}."
        )


def _check_weight(weight: Any, sparse_mean: str) -> None:
    if weight is None:
        return
    check_weight(weight)
    graph = tf.compat.v1.get_default_graph()
    if tf.is_tensor(weight) and getattr(weight, "graph", None) is not graph:
        raise ValueError(f"weight must belong to the default graph; got {weight!r}.")
    if sparse_mean == "per_row":
        raise ValueError(
            "weight needs a mean over replicas, but sparse_mean='per_row' divides each "
            "row by the replicas that touched it. Use 'replicas'."
        )


def _check_resources(variables: Sequence[Any]) -> None:
    others = [
        str(getattr(variable, "name", variable))
        for variable in variables
        if not hasattr(variable, "handle")
    ]
    if others:
        raise TypeError(
            f"Only resource variables are supported; got {', '.join(others)}. Call "
            "tf.compat.v1.enable_resource_variables() before building the model; for a "
            "Keras variable, pass its value."
        )


def _check_gradients(pairs: Sequence[tuple[Any, tf.Variable]]) -> None:
    others = [
        f"{variable.name}: {type(grad).__name__}"
        for grad, variable in pairs
        if not (grad is None or isinstance(grad, tf.Tensor | tf.IndexedSlices))
    ]
    if others:
        raise TypeError(
            "A gradient must be a tf.Tensor, tf.IndexedSlices or None; got "
            f"{', '.join(others)}."
        )
    others = [
        f"{grad.dtype.name} for {variable.name} ({variable.dtype.base_dtype.name})"
        for grad, variable in pairs
        if grad is not None and grad.dtype != variable.dtype.base_dtype
    ]
    if others:
        raise TypeError(
            f"A gradient must have the dtype of its variable; got {', '.join(others)}. "
            "Cast it; for narrower transfers pass compression=."
        )
    unknown = [v.name for _, v in pairs if not v.shape.is_fully_defined()]
    if unknown:
        raise ValueError(
            "Variables must have fully known shapes; got unknown dimensions in "
            f"{', '.join(unknown)}."
        )
    misfits = [_misfit(grad, variable) for grad, variable in pairs if grad is not None]
    found = [misfit for misfit in misfits if misfit]
    if found:
        raise ValueError(
            f"A gradient must have the shape of its variable; got {'; '.join(found)}."
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


def _with_a_row_per_index(grad: Any, variable: tf.Variable) -> Any:
    """Makes a sparse gradient fail in steps where rows and indices differ in number."""
    if not isinstance(grad, tf.IndexedSlices):
        return grad
    values, places = grad.values, grad.indices
    with tf.device(values.device):
        if places.shape.rank is None:
            places = tf.ensure_shape(places, [None])
        known = places.shape.concatenate(values.shape[1:])
        if values.shape == known and known.is_fully_defined():
            return grad
        fits = tf.equal(tf.shape(values)[0], tf.shape(places)[0])
        message = f"A gradient of {variable.name} must have one row per index; got "
        same = tf.debugging.Assert(fits, [message, tf.shape(values), tf.shape(places)])
        with tf.control_dependencies([same]):
            values = tf.ensure_shape(values, known)
    return tf.IndexedSlices(values, places, grad.dense_shape)
