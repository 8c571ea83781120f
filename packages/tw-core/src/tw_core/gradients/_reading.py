"""Checks towers' lists of gradients once, and names every mismatch.

A list that was read is passed on as ``Gradients``, which are not checked again.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import tensorflow as tf

from tw_core._checks import check_flag, check_nested
from tw_core._modes import builds_session_graph, without_autograph
from tw_core._records.collections import with_outer_graphs
from tw_core._records.matching import shared_variables, variable_mismatches
from tw_core._records.origins import base_names
from tw_core._variable_kinds import (
    is_variable,
    reference_variables_named,
    tf_variables,
)
from tw_core.gradients._lists import GradList, is_pair
from tw_core.gradients._shapes import compared, differences, ensured

Ownership: TypeAlias = Literal["own", "shared", "any"]


class Gradients(list[list[Any]]):
    """[K][N] checked gradients: the n-th has one shape and dtype in all towers.

    A function that takes a list of gradients, or of pairs, takes this instead without
    checking it again. ``read_pairs`` and ``read_gradients`` make it; functions that
    reduce or pack make the next one from it.

    Args:
      grads: [K][N] gradients.
      variables: [K][N] their variables; None if they were read without variables.
      tests: see below.

    Attributes:
      tests: ops that compare shapes at run time, and fail the step if they differ.
    """

    def __init__(
        self,
        grads: Iterable[list[Any]],
        variables: Iterable[Sequence[Any]] | None = None,
        tests: Iterable[tf.Operation] = (),
    ) -> None:
        super().__init__(grads)
        self._variables = None if variables is None else [list(v) for v in variables]
        self.tests = tuple(tests)

    @property
    def variables(self) -> list[list[Any]]:
        """[K][N] the gradients' variables, as passed.

        Raises:
          TypeError: the gradients were read without variables.
        """
        if self._variables is None:
            raise TypeError(
                "Gradients.variables: these gradients were read without variables; "
                "read (gradient, variable) pairs with read_pairs."
            )
        return self._variables

    @property
    def pairs(self) -> list[list[tuple[Any, Any]]]:
        """[K][N] (gradient, variable) pairs.

        Raises:
          TypeError: as ``variables``.
        """
        return [
            list(zip(grads, own, strict=True))
            for grads, own in zip(self, self.variables, strict=True)
        ]


@without_autograph
def read_pairs(
    grad_list: "GradList | Gradients",
    *,
    variables: Ownership = "any",
    allow_none: bool = False,
) -> Gradients:
    """Reads and checks the towers' (gradient, variable) pairs.

    Args:
      grad_list: [K][N] pairs; ``Gradients`` are returned as they are.
      variables: ``"own"`` if every tower must have its own, as the replicas of
        ``check_replicated_grad_list``; ``"shared"`` if all must use tower 0's.
      allow_none: whether a gradient may be None.

    Returns:
      The gradients, with the shapes of their variables. One whose shape is not fully
      known passes an op as in ``ensure_gradient_shapes``.

    Raises:
      ValueError: as ``check_grad_list``, ``check_replicated_grad_list`` or
        ``check_shared_grad_list``.
      TypeError: something that is not a list of lists of pairs.
    """
    if isinstance(grad_list, Gradients):
        return grad_list
    _check_pairs(grad_list, variables=variables, allow_none=allow_none)
    return Gradients(*_ensured(grad_list))


@without_autograph
def read_gradients(grads: Sequence[Sequence[Any]]) -> Gradients:
    """Reads and checks the towers' gradients without variables, as reducers take them.

    Args:
      grads: [K][N] tensors and ``IndexedSlices``, K >= 1; ``Gradients`` are returned
        as they are.

    Returns:
      The gradients. Those of a variable whose shapes are not fully known in every
      tower wait for an op, listed in ``tests``, that compares them at run time and
      fails with ``InvalidArgumentError``; they get the merged static shape.

    Raises:
      ValueError: no tower, towers of unequal length, a gradient that is None or of
        another graph, dtypes or static shapes that differ between towers. Every
        offender is named.
      TypeError: something that is neither a tensor nor an ``IndexedSlices``, or not a
        list of lists.
    """
    if isinstance(grads, Gradients):
        return grads
    check_gradients(grads)
    return gradients_of_one_trace(grads)


def gradients_of_one_trace(grads: Sequence[Sequence[Any]]) -> Gradients:
    """As ``read_gradients``, for [K][N] that may differ in unknown shapes only."""
    settled, tests = compared(grads)
    return Gradients(settled, tests=tests)


@without_autograph
def check_grad_list(grad_list: GradList, *, allow_none: bool = False) -> None:
    """Checks that every tower has the same gradients in the same order.

    Variables are compared by name, without a ``tower<k>/`` prefix. In separately
    built models, such as Keras models, names have running numbers (``dense``,
    ``dense_1``): there the numbers are ignored, and names that have nothing in
    common are matched by position.

    Args:
      grad_list: [K][N] pairs.
      allow_none: whether a gradient may be None.

    Raises:
      ValueError: no tower, no gradient, or towers whose gradients differ in
        number, variables, order, shape or dtype; a None; a reference variable.
        Every offender is named.
      TypeError: something that is not a list of lists of pairs.
    """
    _check_pairs(grad_list, allow_none=allow_none)


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
    _check_pairs(grad_list, variables="own")


@without_autograph
def check_shared_grad_list(grad_list: GradList) -> None:
    """Checks like ``check_grad_list``, and that all towers use the same variables.

    Args:
      grad_list: [K][N] pairs.

    Raises:
      ValueError: as ``check_grad_list``; or a variable that is not tower 0's.
      TypeError: something that is not a list of lists of pairs.
    """
    _check_pairs(grad_list, variables="shared")


@without_autograph
def ensure_gradient_shapes(grad_list: GradList) -> list[list[tuple[Any, Any]]]:
    """Gives every gradient the shape of its variable, checked when it is computed.

    A gradient that depends on a placeholder, a ``py_function`` or a ``tf.function``'s
    free dimension may have a partially known shape. If its shape is not the variable's,
    its raw memory would be added to other towers' gradients, or it would shift the
    tensors packed after it.

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
    _check_are_pairs(grad_list)
    return Gradients(*_ensured(grad_list)).pairs


@without_autograph
def check_gradients(grads: Sequence[Sequence[Any]]) -> None:
    """Checks as ``read_gradients``, but compares nothing at run time.

    Args:
      grads: [K][N] tensors and ``IndexedSlices``.

    Raises:
      ValueError: as ``read_gradients``.
      TypeError: as ``read_gradients``.
    """
    check_nested(grads=grads, of="tensors")
    if not grads:
        raise ValueError("grads is empty; it must hold one list of tensors per tower.")
    lengths = [len(tower) for tower in grads]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"Every tower must have the same number of gradients; got {lengths} from "
            f"towers 0..{len(grads) - 1}. A tower falls short when a variable's "
            "gradient is None: drop it, or fill it with zeros, everywhere."
        )
    others = [
        f"grads[{k}][{n}] is {type(grad).__name__}"
        for k, tower in enumerate(grads)
        for n, grad in enumerate(tower)
        if not (grad is None or isinstance(grad, tf.Tensor | tf.IndexedSlices))
    ]
    if others:
        raise TypeError(
            "Every gradient must be a tf.Tensor or tf.IndexedSlices; "
            f"{', '.join(others)}. Convert it with tf.convert_to_tensor."
        )
    names = [[f"position {n}" for n in range(lengths[0])]] * len(grads)
    problems = [*_none_gradients(grads, names), *_foreign(grads, names)]
    # A sparse gradient's own shapes may contradict each other.
    may_differ = len(grads) > 1 or tf.IndexedSlices in map(type, grads[0])
    if problems or may_differ:
        _refuse(problems or differences(grads, names[0]))


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
            f"No gradient for any variable; got {names}. Does the loss depend on them?"
        )


def _ensured(grad_list: GradList) -> tuple[list[list[Any]], list[list[Any]]]:
    """Splits checked pairs; gives gradients of unknown shape that of their variable."""
    grads = [[grad for grad, _ in tower] for tower in grad_list]
    variables = [[variable for _, variable in tower] for tower in grad_list]
    settled = [
        ensured(own, tf_variables(kept), tower=k)
        for k, (own, kept) in enumerate(zip(grads, variables, strict=True))
    ]
    return settled, variables


def _check_pairs(
    grad_list: GradList, *, variables: Ownership = "any", allow_none: bool = False
) -> None:
    check_flag(allow_none=allow_none)
    _check_are_pairs(grad_list)
    if not any(grad_list):
        raise ValueError(
            f"No gradient at all, from {len(grad_list)} towers; a tower function "
            "returns (gradient, variable) pairs."
        )
    grads = [[grad for grad, _ in tower] for tower in grad_list]
    own = [[variable for _, variable in tower] for tower in grad_list]
    _refuse(list(_problems(grads, own, variables, allow_none=allow_none)))


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise ValueError(
            "Every tower must have one gradient per variable, with the same "
            f"variables, shapes and dtypes in the same order; got:\n{listed}"
        )


def _problems(
    grads: Sequence[Sequence[Any]],
    variables: Sequence[Sequence[Any]],
    ownership: Ownership,
    *,
    allow_none: bool,
) -> Iterator[str]:
    names = [base_names(tower) for tower in variables]
    plain = [tf_variables(tower) for tower in variables]
    yield from reference_variables_named([v for tower in variables for v in tower])
    if not allow_none:
        yield from _none_gradients(grads, names)
    yield from _foreign(grads, names, plain)
    mismatches = variable_mismatches(variables, names)
    yield from mismatches
    if ownership == "own":
        for name, towers in shared_variables(variables):
            yield (
                f"{name} is one variable in towers {towers}, and would be updated once "
                "for each; make a new one, or a new model, in every tower, or share "
                "all variables as with a parameter server"
            )
    if ownership == "shared" and not mismatches:
        yield from _not_shared(plain, names[0])
    if not mismatches:
        yield from differences(grads, names[0], plain)


def _not_shared(
    variables: Sequence[Sequence[tf.Variable]], names: Sequence[str]
) -> Iterator[str]:
    for name, column in zip(names, zip(*variables, strict=True), strict=True):
        others = [k for k, own in enumerate(column) if own is not column[0]]
        if others:
            yield (
                f"{name} is a separate variable in towers {others}; all towers must "
                "use tower 0's"
            )


def _none_gradients(
    grads: Sequence[Sequence[Any]], names: Sequence[Sequence[str]]
) -> list[str]:
    towers_of: dict[str, list[int]] = {}
    for k, tower in enumerate(grads):
        for grad, name in zip(tower, names[k], strict=True):
            if grad is None:
                towers_of.setdefault(name, []).append(k)
    return [
        f"{name} has gradient None in towers {towers}: the loss does not depend on "
        "it; leave the variable out, or fill in zeros, everywhere"
        for name, towers in towers_of.items()
    ]


def _foreign(
    grads: Sequence[Sequence[Any]],
    names: Sequence[Sequence[str]],
    variables: Sequence[Sequence[tf.Variable]] | None = None,
) -> Iterator[str]:
    """Names gradients, and variables, that ops made now cannot use."""
    now = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    graphs = set(with_outer_graphs(now))
    # A function captures eager tensors; a session graph cannot.
    usable = graphs if builds_session_graph() else {None, *graphs}
    towers_of: dict[str, list[int]] = {}
    for k, tower in enumerate(grads):
        for n, grad in enumerate(tower):
            dense = grad.values if isinstance(grad, tf.IndexedSlices) else grad
            made_in = [] if grad is None else [getattr(dense, "graph", None)]
            kept_in = getattr(variables[k][n], "graph", None) if variables else None
            is_kept_here = kept_in is None or not graphs or kept_in in graphs
            if not (is_kept_here and usable.issuperset(made_in)):
                towers_of.setdefault(names[k][n], []).append(k)
    what = (
        "or its gradient belongs to another graph"
        if variables
        else "has gradients of another graph, or eager ones in a graph,"
    )
    for name, towers in towers_of.items():
        yield f"{name} {what} in towers {towers}; build all of a step in one graph"


def _check_are_pairs(grad_list: GradList) -> None:
    check_nested(grad_list=grad_list, of="(gradient, variable) pairs")
    others = [
        f"tower {k} item {n}"
        for k, tower in enumerate(grad_list)
        for n, pair in enumerate(tower)
        if not _is_pair(pair)
    ]
    if others:
        raise TypeError(
            "grad_list must hold pairs of a gradient (tensor, IndexedSlices or None) "
            f"and its variable; got something else at {', '.join(others)}."
        )


def _is_pair(pair: Any) -> bool:
    if not is_pair(pair):
        return False
    grad, variable = pair
    is_grad = grad is None or tf.is_tensor(grad) or hasattr(grad, "shape")
    return is_grad and (isinstance(variable, tf.Variable) or is_variable(variable))
