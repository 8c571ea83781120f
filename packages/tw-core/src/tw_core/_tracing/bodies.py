"""Functions and conditionals inside a tower that contain a meeting with the others.

A trace is cut at a meeting, which must therefore be in its own graph, not in a body's:
a ``tf.function`` whose body reaches a meeting is inlined, and a ``tf.cond`` becomes a
meeting itself. The towers agree on its predicate; each branch is traced separately, and
all towers run it inside one ``tf.cond``. Bodies without a meeting are left to
TensorFlow.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_core._tf_compat import (
    apart_from_other_traces,
    inlined,
    replaced_bodies,
    with_gradient,
)
from tw_core._tracing.trace import Trace, current_trace, meet, trace_function


@dataclass(frozen=True, eq=False)
class Conditional:
    """The meeting of a ``tf.cond``; the predicate is its first value."""

    branches: Sequence[Trace]


def meeting_in_bodies() -> AbstractContextManager[None]:
    """Allows meetings in bodies of a tower's function that is traced inside."""
    return replaced_bodies(_conditional, _function)


def agreed(predicates: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the predicate of all towers, checked at run time."""
    if len(predicates) == 1:
        return predicates[0]
    every = tf.stack(predicates)
    message = (
        "Towers synchronise in a branch of a tf.cond, so all must take the same one; "
        "compute its predicate from values equal in all towers, such as a counter. "
        "Predicates of towers 0..:"
    )
    are_same = tf.reduce_all(tf.equal(every, every[0]))
    check = tf.debugging.Assert(are_same, [message, every], summarize=-1)
    with tf.control_dependencies([check]):
        return tf.identity(predicates[0])


def _conditional(
    plain: Callable[..., Any],
    pred: Any,
    true_fn: Callable[[], Any],
    false_fn: Callable[[], Any],
    name: str | None = "cond",
) -> Any:
    trace = current_trace()
    if trace is None:
        return plain(pred, true_fn, false_fn, name)
    try:
        return plain(pred, true_fn, false_fn, name)
    except Exception:
        if not trace.has_met_inside():
            raise
    return _split(trace, pred, [true_fn, false_fn])


def _function(
    plain: Callable[..., Any], function: Any, *arguments: Any, **named: Any
) -> Any:
    trace = current_trace()
    if trace is None:
        return plain(function, *arguments, **named)
    try:
        with apart_from_other_traces():  # those had no meetings
            return plain(function, *arguments, **named)
    except Exception:
        if not trace.has_met_inside():
            raise
    return inlined(function)(*arguments, **named)


def _split(trace: Trace, pred: Any, fns: Sequence[Callable[[], Any]]) -> Any:
    branches = [
        trace_function(_of_tensors(fn), (), list, total=trace.total, around=trace)
        for fn in fns
    ]
    specs = _common_specs([branch.meetings[-1].brought for branch in branches])
    outer = {id(t): t for branch in branches for _, t in branch.captured}.values()
    pred = tf.reshape(tf.cast(pred, tf.bool), [])
    leaves = tf.nest.flatten(specs, expand_composites=True)
    given = meet(
        Conditional(branches),
        [pred, *filter(trace.reaches, outer)],
        answer=[spec for spec in leaves if spec is not None],
        waits=True,
    )
    if given:
        sources = [t for t in outer if t.dtype.is_floating or t.dtype == tf.resource]
        given = with_gradient(given, sources, _refuse_gradient)
    rest = iter(given or ())
    results = [None if spec is None else next(rest) for spec in leaves]
    return tf.nest.pack_sequence_as(specs, results, expand_composites=True)


def _of_tensors(fn: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a branch whose results are tensors, or None, as ``tf.cond`` has them."""

    def branch() -> Any:
        return tf.nest.map_structure(_as_tensor, fn())

    return branch


def _as_tensor(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, tf.Operation):
        return None  # An effect runs automatically.
    return leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)


def _common_specs(results: Sequence[Any]) -> Any:
    """Returns specs that fit both branches' results; refuses results that differ."""

    def common(one: Any, other: Any) -> Any:
        if one is None and other is None:
            return None
        specs = [tf.type_spec_from_value(leaf) for leaf in (one, other)]
        both = specs[0].most_specific_common_supertype(specs[1:])
        if both is None:
            raise TypeError(specs)
        return both

    try:
        return tf.nest.map_structure(common, *results)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "Both branches of a tf.cond must return the same structure of tensors of "
            f"the same dtypes; got {results}."
        ) from error


def _refuse_gradient(*_: Any) -> Any:
    raise RuntimeError(
        "tw_core: the results of a tf.cond in which towers synchronise cannot be "
        "differentiated from outside; take the gradients inside the branch."
    )
