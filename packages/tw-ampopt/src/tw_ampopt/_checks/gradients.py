"""Gradients as callers pass them, read against their variables: kind, dtype, shape.

Static shapes are compared while the step is built, all others by tw-core when it runs.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tw_ampopt._checks.arguments import (
    check_counter,
    check_name,
    check_same_graph,
    check_variables,
    lists_by_tower,
    name_of,
)
from tw_ampopt._variables import identity
from tw_core.gradients import Gradient
from tw_core.internal import (
    check_any_gradient,
    ensure_gradient_shapes,
    list_pairs,
    repeated_variables,
)

_KINDS = (tf.Tensor, tf.Variable, tf.IndexedSlices, np.ndarray, np.generic)

# A gradient in context: its tower's number, the gradient, and its variable.
_Place: TypeAlias = tuple[int, Any, Any]


def check_gradients(
    towers: Sequence[Sequence[Any]], lists: Sequence[Sequence[Any]]
) -> list[list[Gradient]]:
    """Returns [K][N] gradients as tensors, checked against their variables."""
    pairs = [
        list(zip(map(_as_tensors, tower), own, strict=True))
        for tower, own in zip(towers, lists, strict=True)
    ]
    places = [
        (k, grad, variable)
        for k, tower in enumerate(pairs)
        for grad, variable in tower
        if grad is not None
    ]
    _check_kinds(places)
    _check_graphs(places)
    _check_shapes(places)
    settled = [[(_with_dense_shape(g, v), v) for g, v in tower] for tower in pairs]
    return [[grad for grad, _ in own] for own in ensure_gradient_shapes(settled)]


def check_still_usable(
    towers: Sequence[Sequence[Sequence[Any]]], lists: Sequence[Sequence[Any]]
) -> None:
    """Checks that kept [K][N][calls] gradients belong to the graph being built."""
    _check_graphs(
        [
            (k, grad, variable)
            for k, (tower, own) in enumerate(zip(towers, lists, strict=True))
            for calls, variable in zip(tower, own, strict=True)
            for grad in calls
            if grad is not None
        ]
    )


def check_application(
    grads_and_vars: Any, global_step: Any, name: Any
) -> tuple[list[Gradient], list[Any]]:
    """Checks one tower's ``apply_gradients``; returns [N] gradients and variables."""
    pairs = _check_pairs(list_pairs("grads_and_vars", grads_and_vars))
    check_step_and_name(global_step, name)
    variables = [variable for _, variable in pairs]
    [grads] = check_gradients([[grad for grad, _ in pairs]], [variables])
    return grads, variables


def check_step_and_name(global_step: Any, name: Any) -> None:
    """Checks the last two arguments of an ``apply_gradients``."""
    check_counter(global_step)
    if name is not None:
        check_name(name)


def gradients_by_tower(
    grads: Any, lists: Sequence[Sequence[Any]]
) -> list[list[list[Gradient]]]:
    """Checks gradients, [K][N] or [N], of [K][N] variables; returns [K][N][1]."""
    wanted = "grads must be [K][N] gradients, one list per tower"
    by_tower = lists_by_tower(grads, wanted)
    counts, expected = [len(t) for t in by_tower], [len(own) for own in lists]
    if counts != expected:
        raise ValueError(
            "grads must hold one gradient (or None) per variable from each of "
            f"{len(lists)} towers, {expected} of them; got {counts}."
        )
    check_any_gradient([g for tower in by_tower for g in tower], lists[0])
    return _of_one_call(check_gradients(by_tower, lists))


def gradients_of_pairs(
    grads_and_vars: Any, lists: Sequence[Sequence[Any]]
) -> list[list[list[Gradient]]]:
    """Checks pairs, [K][N] or [N], of [K][N] variables; returns [K][N][1]."""
    is_once = isinstance(grads_and_vars, Iterator)  # as a zip, which is read once
    given = list(grads_and_vars) if is_once else grads_and_vars
    nested = bool(given) and isinstance(given, list | tuple)
    nested = nested and all(isinstance(tower, list) for tower in given)
    by_tower = [
        list_pairs("grads_and_vars", tower) for tower in (given if nested else [given])
    ]
    if len(by_tower) != len(lists):
        raise ValueError(
            f"grads_and_vars must hold pairs from each of {len(lists)} towers; got "
            f"pairs from {len(by_tower)}."
        )
    grads = []
    for tower, own in zip(by_tower, lists, strict=True):
        found = {identity(v): (grad, v) for grad, v in _check_pairs(tower)}
        known = {identity(v): v for v in own}
        unknown = [name_of(v) for key, (_, v) in found.items() if key not in known]
        missing = [name_of(v) for key, v in known.items() if key not in found]
        if unknown or missing:
            raise ValueError(
                "The pairs must have the variables that the optimizer was made for; "
                f"got unknown {unknown}, and missing {missing}. Pass None as the "
                "gradient of a variable without one."
            )
        grads.append([found[key][0] for key in known])
    return _of_one_call(check_gradients(grads, lists))


def _of_one_call(grads: Sequence[Sequence[Gradient]]) -> list[list[list[Gradient]]]:
    return [[[grad] for grad in tower] for tower in grads]


def _check_pairs(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Checks [N] pairs, except for each gradient's kind, dtype and shape."""
    variables = check_variables((variable for _, variable in pairs))
    check_any_gradient([grad for grad, _ in pairs], variables)
    twice = sorted(map(name_of, repeated_variables(variables)))
    if twice:
        raise ValueError(
            f"grads_and_vars holds {twice} more than once; each variable has one "
            "gradient. Add them up first."
        )
    return list(pairs)


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
        f"{fault} for {name_of(variable)} in tower {k}"
        for k, grad, variable in places
        if (fault := _kind_fault(grad))
    ]
    if wrong:
        raise TypeError(
            "A gradient must be a tensor of a floating dtype, an IndexedSlices with "
            f"int32 or int64 indices, or None; got {'; '.join(wrong)}. Cast it where "
            "you compute it."
        )


def _kind_fault(grad: Any) -> str | None:
    if not isinstance(grad, _KINDS):
        return repr(grad)
    dtype = tf.as_dtype(grad.dtype)
    if not dtype.is_floating:
        return str(dtype.name)
    indices = getattr(grad, "indices", None)
    if indices is not None and indices.dtype not in (tf.int32, tf.int64):
        return f"indices of {indices.dtype.name}"
    return None


def _check_graphs(places: Sequence[_Place]) -> None:
    def named(n: int) -> str:
        k, _, variable = places[n]
        return f"the gradient of {name_of(variable)} in tower {k}"

    check_same_graph([grad for _, grad, _ in places], named)


def _check_shapes(places: Sequence[_Place]) -> None:
    wrong = [
        f"{name_of(variable)} {variable.shape} has a gradient of shape {_shown(grad)} "
        f"in tower {k}"
        for k, grad, variable in places
        if not _fits(grad, variable)
    ]
    if wrong:
        raise ValueError(
            "Gradients must have their variables' shapes, in the variables' order; "
            f"got: {'; '.join(wrong)}."
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


def _shown(grad: Any) -> str:
    if not isinstance(grad, tf.IndexedSlices):
        return str(grad.shape)
    return (
        f"{grad.shape} with values {grad.values.shape} for indices {grad.indices.shape}"
    )


def _with_dense_shape(grad: Any, variable: Any) -> Gradient:
    if not isinstance(grad, tf.IndexedSlices):
        return None if grad is None else tf.convert_to_tensor(grad)
    if grad.shape.is_fully_defined():
        return grad
    sizes = tf.TensorShape(variable.shape).as_list()
    shape = tf.constant(sizes, grad.indices.dtype)
    return tf.IndexedSlices(grad.values, grad.indices, shape)
