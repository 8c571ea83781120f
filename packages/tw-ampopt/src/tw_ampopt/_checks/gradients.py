"""Checks of gradients against their variables: kind, dtype, shape.

Shapes that are known while the step is built are compared then, all others by tw-core
when the step runs.
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
from tw_core.checks import caller
from tw_core.gradients import check_any_gradient, ensure_gradient_shapes
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
    settled = {
        (k, id(variable)): _with_dense_shape(grad, variable)
        for k, grad, variable in places
    }
    pairs = [
        [(settled.get((k, id(variable))), variable) for variable in own]
        for k, own in enumerate(lists)
    ]
    return [[grad for grad, _ in own] for own in ensure_gradient_shapes(pairs)]


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


def _with_dense_shape(grad: Any, variable: Any) -> _Gradient:
    if not isinstance(grad, tf.IndexedSlices):
        return tf.convert_to_tensor(grad)
    if grad.shape.is_fully_defined():
        return grad
    sizes = tf.TensorShape(variable.shape).as_list()
    shape = tf.constant(sizes, grad.indices.dtype)
    return tf.IndexedSlices(grad.values, grad.indices, shape)
