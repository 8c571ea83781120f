"""Checks that all towers have the same gradients, naming every mismatch."""

from collections.abc import Iterable, Iterator, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from tw_core._records.matching import shared_variables, variable_mismatches
from tw_core._records.origins import base_name
from tw_core._variable_kinds import reference_variables_named, tf_variable
from tw_core.checks import caller, check_flag, public
from tw_core.gradients._lists import GradList, check_are_pairs
from tw_core.modes import without_autograph


class _Item(NamedTuple):
    """A tower's gradient for a variable."""

    grad: Any
    variable: Any  # as passed; its name appears in messages
    plain: tf.Variable  # ``variable``, or the one that a Keras variable holds


@public
@without_autograph
def check_grad_list(grad_list: GradList, *, allow_none: bool = False) -> None:
    """Checks that every tower has the same gradients in the same order.

    Variables are compared by name, without a ``tower<k>/`` prefix. Separately
    built models, such as Keras models, have names of their own with running
    numbers (``dense``, ``dense_1``): there the numbers are ignored, and names
    that have nothing in common are matched by position.

    Args:
      grad_list: [K][N] pairs.
      allow_none: whether a gradient may be None.

    Raises:
      ValueError: no tower, no gradient, or towers whose gradients differ in
        number, variables, order, shape or dtype; a None; a reference variable.
        Every offender is named.
      TypeError: something that is not a list of lists of pairs.
    """
    _check(grad_list, allow_none=allow_none)


@public
@without_autograph
def check_replicated_grad_list(grad_list: GradList) -> None:
    """Checks like ``check_grad_list``, and that every tower has its own variables.

    A variable that several towers share would be updated once for each of them.

    Args:
      grad_list: [K][N] pairs.

    Raises:
      ValueError: as ``check_grad_list``; or a variable that towers share.
      TypeError: something that is not a list of lists of pairs.
    """
    _check(grad_list, ownership="own")


@public
@without_autograph
def check_shared_grad_list(grad_list: GradList) -> None:
    """Checks like ``check_grad_list``, and that all towers use the same variables.

    Args:
      grad_list: [K][N] pairs.

    Raises:
      ValueError: as ``check_grad_list``; or a variable that is not tower 0's.
      TypeError: something that is not a list of lists of pairs.
    """
    _check(grad_list, ownership="shared")


@public
def check_any_gradient(grads: Iterable[Any], variables: Iterable[Any]) -> None:
    """Refuses gradients that are all None.

    Args:
      grads: the gradients of one tower or of several.
      variables: named in the message.

    Raises:
      ValueError: no gradient, or all are None.
    """
    if all(grad is None for grad in grads):
        names = [getattr(v, "path", None) or v.name for v in variables]
        raise ValueError(
            f"{caller()}: no gradient for any variable; got {names}. Does the loss "
            "depend on them?"
        )


@public
def check_weight(weight: Any) -> None:
    """Refuses anything that cannot weight gradients in a mean.

    Args:
      weight: such as a number of rows; the values of tensors are not checked.

    Raises:
      TypeError: neither a real number nor a scalar tensor of a real dtype.
      ValueError: a number that is below 0 or not finite.
    """
    if tf.is_tensor(weight):
        is_real = weight.dtype.is_floating or weight.dtype.is_integer
        is_weight = bool(is_real and weight.shape.is_compatible_with([]))
    else:
        is_weight = isinstance(weight, Real) and not isinstance(weight, bool)
    if not is_weight:
        raise TypeError(
            f"{caller()}: weight must be a real number or a scalar tensor, such as the "
            f"number of rows; got {weight!r:.80}."
        )
    if isinstance(weight, Real) and not 0 <= float(weight) < float("inf"):
        raise ValueError(
            f"{caller()}: weight must be finite and 0 or more; got {weight}."
        )


def _check(
    grad_list: GradList,
    *,
    allow_none: bool = False,
    ownership: Literal["own", "shared"] | None = None,
) -> None:
    check_flag(allow_none=allow_none)
    check_are_pairs(grad_list)
    _check_is_not_empty(grad_list)
    problems = list(_problems(grad_list, allow_none=allow_none, ownership=ownership))
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise ValueError(
            f"{caller()}: every tower must bring one gradient per variable, with the "
            f"same variables, shapes and dtypes in the same order; got:\n{listed}"
        )


def _problems(
    grad_list: GradList, *, allow_none: bool, ownership: str | None
) -> Iterator[str]:
    items = [[_Item(g, v, tf_variable(v)) for g, v in tower] for tower in grad_list]
    variables = [[item.variable for item in tower] for tower in items]
    yield from reference_variables_named([v for tower in variables for v in tower])
    if not allow_none:
        yield from _none_gradients(items)
    yield from _foreign(items)
    mismatches = variable_mismatches(variables)
    yield from mismatches
    if ownership == "own":
        yield from _shared(variables)
    if ownership == "shared" and not mismatches:
        yield from _not_shared(items)
    if not mismatches:
        for column in zip(*items, strict=True):
            for difference in _differences(column):
                yield f"{base_name(column[0].variable)}{difference}"


def _shared(variables: Sequence[Sequence[Any]]) -> list[str]:
    return [
        f"{name} is one variable in towers {towers}, and would be updated once for "
        "each; make a new one, or a new model, in every tower, or share all variables "
        "as with a parameter server"
        for name, towers in shared_variables(variables)
    ]


def _not_shared(items: Sequence[Sequence[_Item]]) -> Iterator[str]:
    for column in zip(*items, strict=True):
        first = column[0]
        others = [k for k, item in enumerate(column) if item.plain is not first.plain]
        if others:
            yield (
                f"{base_name(first.variable)} is a variable of their own in towers "
                f"{others}, where all towers must use tower 0's"
            )


def _check_is_not_empty(grad_list: GradList) -> None:
    if not any(grad_list):
        raise ValueError(
            f"{caller()}: no gradient at all, from {len(grad_list)} towers; a tower "
            "function returns (gradient, variable) pairs."
        )


def _none_gradients(items: Sequence[Sequence[_Item]]) -> list[str]:
    towers_of: dict[str, list[int]] = {}
    for k, tower in enumerate(items):
        for item in tower:
            if item.grad is None:
                towers_of.setdefault(base_name(item.variable), []).append(k)
    return [
        f"{name} has gradient None in towers {towers}: the loss does not depend on "
        "it; leave the variable out, or fill in zeros, everywhere"
        for name, towers in towers_of.items()
    ]


def _foreign(items: Sequence[Sequence[_Item]]) -> Iterator[str]:
    """Names variables that are in another graph, or whose gradients are."""
    if tf.executing_eagerly():
        return
    graphs = set(_graphs_being_built())
    towers_of: dict[str, list[int]] = {}
    for k, tower in enumerate(items):
        for item in tower:
            dense = getattr(item.grad, "values", item.grad)
            own = {getattr(x, "graph", None) for x in (dense, item.plain)} - {None}
            if not own <= graphs:
                towers_of.setdefault(base_name(item.variable), []).append(k)
    for name, towers in towers_of.items():
        yield (
            f"{name} or its gradient is of another graph in towers {towers}; build all "
            "of a step in one graph"
        )


def _graphs_being_built() -> Iterator[tf.Graph]:
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def _differences(column: Sequence[_Item]) -> Iterator[str]:
    """Compares one variable's gradients across towers; the caller adds its name."""
    where = f"in towers 0..{len(column) - 1}"
    variables = [item.plain for item in column]
    shape, kept_in = variables[0].shape, [v.shape for v in variables]
    shapes = [_shape(item.grad, item.plain) for item in column]
    if not _agree([shape, *shapes]):
        yield (
            f", of shape {shape}, has gradients of shapes "
            f"{[str(other) for other in shapes]} {where}"
        )
    elif not _agree(kept_in):
        yield f" has shapes {[str(other) for other in kept_in]} {where}"
    kept_as = [v.dtype.name for v in variables]
    if len(set(kept_as)) > 1:
        yield f" has dtypes {kept_as} {where}"
    kinds = [
        tf.as_dtype(item.plain.dtype if item.grad is None else item.grad.dtype)
        for item in column
    ]
    dtypes = [dtype.name for dtype in kinds]
    if len(set(dtypes)) > 1 and dtypes != kept_as:
        yield f" has gradients of dtypes {dtypes} {where}"
    elif not all(map(_may_update, kinds, variables)):
        yield f", of dtype {kept_as[0]}, has gradients of dtypes {dtypes} {where}"


def _may_update(dtype: tf.DType, variable: tf.Variable) -> bool:
    # TensorFlow's optimizers cast complex gradients, and drop the imaginary part.
    if dtype.is_complex:
        return bool(variable.dtype.is_complex)
    return bool(dtype.is_floating or dtype.is_integer)


def _agree(shapes: Sequence[tf.TensorShape]) -> bool:
    # All against all: [None] agrees with [3] and with [4], which differ.
    known = tf.TensorShape(None)
    for shape in shapes:
        if not known.is_compatible_with(shape):
            return False
        known = known.merge_with(shape)
    return True


def _shape(grad: Any, variable: tf.Variable) -> tf.TensorShape:
    if grad is None:
        return variable.shape
    if isinstance(grad, tf.IndexedSlices):
        rows = tf.TensorShape(grad.values.shape)
        return _number_of_rows(grad, variable).concatenate(rows[1:])
    return tf.TensorShape(grad.shape)


def _number_of_rows(grad: tf.IndexedSlices, variable: tf.Variable) -> tf.TensorShape:
    known = None if grad.dense_shape is None else tf.get_static_value(grad.dense_shape)
    return variable.shape[:1] if known is None else tf.TensorShape([known[0]])
