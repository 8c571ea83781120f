"""Lists of gradients: [K][N] (gradient, variable) pairs, split, merged and shaped.

K towers, N variables, always in that order. A gradient is a tensor, an
``IndexedSlices`` or None.
"""

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tw_core._variable_kinds import is_variable, tf_variable
from tw_core.checks import caller, check_list, public
from tw_core.modes import without_autograph

Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"
GradList: TypeAlias = "Sequence[Sequence[tuple[Gradient, tf.Variable]]]"


@public
@without_autograph
def split_grad_list(
    grad_list: GradList,
) -> tuple[list[list[Gradient]], list[list[tf.Variable]]]:
    """Separates gradients from variables.

    Args:
      grad_list: [K][N] (gradient, variable) pairs.

    Returns:
      [K][N] gradients and [K][N] variables.

    Raises:
      TypeError: something that is not a list of lists of pairs.

    >>> split_grad_list([[("g0", "v0"), ("g1", "v1")]])
    ([['g0', 'g1']], [['v0', 'v1']])
    """
    for k, tower in enumerate(_lists(grad_list=grad_list)):
        for n, pair in enumerate(tower):
            if not _has_two(pair):
                raise TypeError(
                    "split_grad_list: grad_list must hold (gradient, variable) pairs; "
                    f"got {pair!r} at tower {k} item {n}."
                )
    grads = [[grad for grad, _ in tower] for tower in grad_list]
    variables = [[variable for _, variable in tower] for tower in grad_list]
    return grads, variables


@public
@without_autograph
def merge_grad_list(
    all_grads: Sequence[Sequence[Gradient]],
    all_vars: Sequence[Sequence[tf.Variable]],
) -> list[list[tuple[Gradient, tf.Variable]]]:
    """Pairs gradients with variables; undoes ``split_grad_list``.

    Args:
      all_grads: [K][N] gradients.
      all_vars: [K][N] variables.

    Returns:
      [K][N] pairs.

    Raises:
      ValueError: the two differ in K or N.
      TypeError: one is not a list of lists.

    >>> merge_grad_list([["g0", "g1"]], [["v0", "v1"]])
    [[('g0', 'v0'), ('g1', 'v1')]]
    """
    _lists(all_grads=all_grads)
    _lists(all_vars=all_vars)
    grads, variables = [len(g) for g in all_grads], [len(v) for v in all_vars]
    if grads != variables:
        raise ValueError(
            f"{caller()}: gradients and variables must have the same lengths; "
            f"got {grads} gradients and {variables} variables per tower."
        )
    return [
        list(zip(grads, variables, strict=True))
        for grads, variables in zip(all_grads, all_vars, strict=True)
    ]


@public
@without_autograph
def ensure_gradient_shapes(grad_list: GradList) -> list[list[tuple[Any, Any]]]:
    """Gives every gradient the shape of its variable, checked when it is computed.

    A gradient that reads a placeholder, a ``py_function`` or a ``tf.function``'s free
    dimension may have a partially known shape. If its shape is not the variable's, its
    raw memory would be added to other towers' gradients, or it would shift the tensors
    packed after it.

    Args:
      grad_list: [K][N] (gradient, variable) pairs that pass ``check_grad_list``; a
        None stays.

    Returns:
      The same pairs. A gradient whose shape is not fully known passes an op named
      after tower and variable, ``check_gradient_shape/tower1/w``, which fails with
      ``InvalidArgumentError`` where the shape differs. In an ``IndexedSlices`` the
      shape of a row is checked, but not the number of rows.

    Raises:
      TypeError: something that is not a list of lists of pairs.
    """
    check_are_pairs(grad_list)
    return [
        [(_ensured(grad, variable, tower=k), variable) for grad, variable in pairs]
        for k, pairs in enumerate(grad_list)
    ]


def _ensured(grad: Any, variable: Any, *, tower: int) -> Any:
    if grad is None:
        return None
    plain = tf_variable(variable)
    name = f"check_gradient_shape/tower{tower}/{plain.name.split(':')[0]}"
    if not isinstance(grad, tf.IndexedSlices):
        return _with_shape(grad, plain.shape, name)
    rows = tf.TensorShape([None]).concatenate(plain.shape[1:])
    values = _with_shape(grad.values, rows, name)
    return tf.IndexedSlices(values, grad.indices, grad.dense_shape)


def _with_shape(tensor: tf.Tensor, shape: tf.TensorShape, name: str) -> tf.Tensor:
    if str(tensor.shape.merge_with(shape)) == str(tensor.shape):
        return tensor  # The variable's shape adds nothing.
    # On the gradient's device, whatever device is in scope.
    with tf.device(tensor.device or None):
        return tf.ensure_shape(
            tensor, shape, name=re.sub(r"[^A-Za-z0-9_.\\/-]", "_", name)
        )


def check_are_pairs(grad_list: GradList) -> None:
    """Refuses anything but a list of lists of (gradient, variable) pairs."""
    if not isinstance(grad_list, Sequence) or not all(
        isinstance(tower, Sequence) for tower in grad_list
    ):
        raise TypeError(
            f"{caller()}: grad_list must be [K][N] (gradient, variable) pairs, one "
            f"list per tower; got {type(grad_list).__name__}: {str(grad_list)[:80]}. "
            "One tower is a list in a list."
        )
    others = [
        f"tower {k} item {n}"
        for k, tower in enumerate(grad_list)
        for n, pair in enumerate(tower)
        if not _is_pair(pair)
    ]
    if others:
        raise TypeError(
            f"{caller()}: grad_list must hold pairs of a gradient (tensor, "
            "IndexedSlices or None) and its variable; got something else at "
            f"{', '.join(others)}."
        )


def _has_two(pair: Any) -> bool:
    is_sequence = isinstance(pair, Sequence) and not isinstance(pair, str)
    return is_sequence and len(pair) == 2


def _is_pair(pair: Any) -> bool:
    if not _has_two(pair):
        return False
    grad, variable = pair
    is_grad = grad is None or hasattr(grad, "shape") or tf.is_tensor(grad)
    return is_grad and is_variable(variable)


def _lists(**argument: Any) -> Sequence[Sequence[Any]]:
    ((name, towers),) = argument.items()
    check_list(of="lists, one per tower", empty=True, **argument)
    for k, tower in enumerate(towers):
        own = {f"{name}[{k}]": tower}
        check_list(of="one tower's items", empty=True, **own)
    return towers  # type: ignore[no-any-return]
