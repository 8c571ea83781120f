"""Checks of gradients against their variables: kind, dtype, shape.

Shapes that are known while the step is built are compared then, all others when the
step runs: small gradients are packed, and one of the wrong length would silently move
elements from one variable to another.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tw_ampopt._checks.arguments import (
    check_counter,
    check_name,
    check_same_graph,
    check_variables,
    name_of,
)
from tw_ampopt._variables import host_of
from tw_core.checks import caller
from tw_core.gradients import check_any_gradient
from tw_core.modes import compiles_with_xla
from tw_core.variables import repeated_variables

_KINDS = (tf.Tensor, tf.Variable, tf.IndexedSlices, np.ndarray, np.generic)

_Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices
# A gradient in context: its tower's number, the gradient, and its variable.
_Place: TypeAlias = tuple[int, Any, Any]


def check_gradients(
    towers: Sequence[Sequence[Any]], lists: Sequence[Sequence[Any]]
) -> list[list[_Gradient | None]]:
    """Returns [K][N] gradients as tensors, checked against their variables."""
    places = [
        (k, _as_tensors(grad), variable)
        for k, (tower, own) in enumerate(zip(towers, lists, strict=True))
        for grad, variable in zip(tower, own, strict=True)
        if grad is not None
    ]
    _check_kinds(places)
    _check_graphs(places)
    _check_dtypes(places)
    _check_shapes(places)
    checked = iter([_of_known_shape(place) for place in places])
    return [
        [None if grad is None else next(checked) for grad in tower] for tower in towers
    ]


def check_still_usable(
    towers: Sequence[Sequence[Sequence[Any]]], lists: Sequence[Sequence[Any]]
) -> None:
    """Checks that kept [K][N][calls] gradients belong to the graph being built."""
    places = [
        (k, grad, variable)
        for k, (tower, own) in enumerate(zip(towers, lists, strict=True))
        for calls, variable in zip(tower, own, strict=True)
        for grad in calls
        if grad is not None
    ]
    _check_graphs(places)


def check_application(
    grads_and_vars: Any, global_step: Any, name: Any
) -> tuple[list[_Gradient | None], list[Any]]:
    """Checks one tower's ``apply_gradients``; returns [N] gradients and variables."""
    pairs = check_pairs(list_pairs(grads_and_vars))
    check_step_and_name(global_step, name)
    variables = [variable for _, variable in pairs]
    [grads] = check_gradients([[grad for grad, _ in pairs]], [variables])
    return grads, variables


def check_step_and_name(global_step: Any, name: Any) -> None:
    """Checks the last two arguments of an ``apply_gradients``."""
    check_counter(global_step)
    if name is not None:
        check_name(name)


def list_pairs(grads_and_vars: Any) -> list[Any]:
    """Lists the items of an iterable, such as a ``zip``."""
    if isinstance(grads_and_vars, str | dict) or not isinstance(
        grads_and_vars, Iterable
    ):
        raise TypeError(
            f"{caller()}: grads_and_vars must be a list of (gradient, variable) pairs; "
            f"got {grads_and_vars!r}."
        )
    return list(grads_and_vars)


def check_pairs(pairs: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Checks [N] pairs, except for each gradient's kind, dtype and shape."""
    wrong = [p for p in pairs if not isinstance(p, tuple | list) or len(p) != 2]
    if wrong:
        raise TypeError(
            f"{caller()}: grads_and_vars must hold (gradient, variable) pairs; got "
            f"{wrong!r}."
        )
    variables = check_variables((variable for _, variable in pairs))
    check_any_gradient([grad for grad, _ in pairs], variables)
    twice = sorted(map(name_of, repeated_variables(variables)))
    if twice:
        raise ValueError(
            f"{caller()}: {twice} came more than once; each variable has one gradient. "
            "Add them up first."
        )
    return [(grad, variable) for grad, variable in pairs]


def _as_tensors(grad: Any) -> Any:
    if not isinstance(grad, tf.IndexedSlices):
        return grad
    shape = grad.dense_shape
    return tf.IndexedSlices(
        tf.convert_to_tensor(grad.values),
        tf.convert_to_tensor(grad.indices),
        None if shape is None else tf.convert_to_tensor(shape),
    )


def _check_kinds(places: Sequence[_Place]) -> None:
    wrong = [
        f"{grad!r} for {name_of(variable)} in tower {k}"
        for k, grad, variable in places
        if not isinstance(grad, _KINDS)
    ]
    if wrong:
        raise TypeError(
            f"{caller()}: a gradient is a tensor, an IndexedSlices, or None; got "
            f"{'; '.join(wrong)}."
        )


def _check_graphs(places: Sequence[_Place]) -> None:
    grads = [grad for _, grad, _ in places]
    check_same_graph(grads, lambda n: _named(places[n]))


def _check_dtypes(places: Sequence[_Place]) -> None:
    wrong = [
        f"{tf.as_dtype(grad.dtype).name} for {name_of(variable)} in tower {k}"
        for k, grad, variable in places
        if not tf.as_dtype(grad.dtype).is_floating
    ]
    wrong += [
        f"indices of {grad.indices.dtype.name} for {name_of(variable)} in tower {k}"
        for k, grad, variable in places
        if isinstance(grad, tf.IndexedSlices)
        and grad.indices.dtype not in (tf.int32, tf.int64)
    ]
    if wrong:
        raise TypeError(
            f"{caller()}: gradients must be of a floating dtype, indices int32 or "
            f"int64; got {', '.join(wrong)}. Cast them where you compute them."
        )


def _check_shapes(places: Sequence[_Place]) -> None:
    wrong = [
        f"{name_of(variable)} {variable.shape} has a gradient of shape {_shown(grad)} "
        f"in tower {k}"
        for k, grad, variable in places
        if not _fits(grad, variable)
    ]
    if wrong:
        raise ValueError(
            f"{caller()}: gradients must have their variables' shapes, in the "
            f"variables' order; got: {'; '.join(wrong)}."
        )


def _fits(grad: Any, variable: Any) -> bool:
    shape = tf.TensorShape(variable.shape)
    if not isinstance(grad, tf.IndexedSlices):
        return bool(shape.is_compatible_with(grad.shape))
    if shape.rank == 0:
        return False
    rows, places = grad.values.shape, grad.indices.shape
    return bool(
        shape.is_compatible_with(grad.shape)
        and shape[1:].is_compatible_with(rows[1:])
        and rows[:1].is_compatible_with(places)
    )


def _named(place: _Place) -> str:
    k, _, variable = place
    return f"the gradient of {name_of(variable)} in tower {k}"


def _shown(grad: Any) -> str:
    if not isinstance(grad, tf.IndexedSlices):
        return str(grad.shape)
    return (
        f"{grad.shape} with values {grad.values.shape} for indices {grad.indices.shape}"
    )


def _of_known_shape(place: _Place) -> _Gradient:
    _, grad, variable = place
    shape = tf.TensorShape(variable.shape)
    if not isinstance(grad, tf.IndexedSlices):
        return _compared(tf.convert_to_tensor(grad), shape, place)
    dense_shape = grad.dense_shape
    if not grad.shape.is_fully_defined():
        dense_shape = tf.constant(shape.as_list(), grad.indices.dtype)
    rows = _compared(grad.values, shape[1:], place, skip=1)
    return tf.IndexedSlices(rows, grad.indices, dense_shape)


def _compared(
    value: tf.Tensor, wanted: tf.TensorShape, place: _Place, *, skip: int = 0
) -> tf.Tensor:
    """Compares a tensor's shape when it runs, from dimension ``skip`` on."""
    if value.shape.rank is not None and value.shape[skip:].is_fully_defined():
        return value
    if compiles_with_xla():  # which drops assertions
        return tf.ensure_shape(value, [None] * skip + wanted.as_list())
    with tf.device(value.device or None):
        check = _shape_check(tf.shape(value)[skip:], wanted, place)
    sizes = tf.constant([-1] * skip + wanted.as_list(), tf.int32)
    with tf.device(host_of(value.device) or None):
        # TensorFlow infers a shape from what later ops require, and would remove the
        # check; it cannot infer across a reshape to a shape that it does not know.
        hidden = tf.raw_ops.PlaceholderWithDefault(input=sizes, shape=sizes.shape)
    with tf.device(value.device or None), tf.control_dependencies([check]):
        value = tf.reshape(value, hidden)
    value.set_shape([None] * skip + wanted.as_list())
    return value


def _shape_check(got: tf.Tensor, wanted: tf.TensorShape, place: _Place) -> tf.Operation:
    sizes = wanted.as_list()
    # Shapes of different ranks may be equal by broadcasting.
    same = tf.logical_and(
        tf.equal(tf.size(got), len(sizes)),
        tf.reduce_all(
            tf.raw_ops.Equal(
                x=got, y=tf.constant(sizes, tf.int32), incompatible_shape_error=False
            )
        ),
    )
    what = "rows of shape" if isinstance(place[1], tf.IndexedSlices) else "shape"
    message = (
        f"{caller()}: {_named(place)} must have {what} {sizes}, as its variable has, "
        "in the variables' order; got:"
    )
    return tf.debugging.Assert(same, [message, got])
