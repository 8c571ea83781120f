"""Sending each gradient to the reducer that suits it."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import tensorflow as tf

from tw_core.internal import Gradients, check_function
from tw_reduce._checks import check_reducer, reduced_by
from tw_reduce._combinators.mean import Dealer
from tw_reduce._reducer import Reducer, Tensorlike
from tw_reduce._tensor_info import TensorInfo, describe_columns

_SCOPE = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.-]*")


def partition(
    route: Callable[[TensorInfo], str], reducers: Mapping[str, Reducer]
) -> Reducer:
    """Makes a reducer that distributes the gradients among several others.

    For example sparse gradients to ``sum_balanced`` and dense ones to
    ``sum_collective``::

        partition(
            lambda info: "sparse" if info.is_sparse else "dense",
            {"sparse": balanced, "dense": collective},
        )

    Args:
      route: takes a gradient's info (sparse if any tower's is) and returns the name of
        its reducer.
      reducers: by name; each gets only its own gradients, in their order.

    Returns:
      A reducer.

    Raises:
      TypeError: ``route`` or a reducer is not a function, ``reducers`` not a mapping.
      ValueError: no reducers, or a name that TensorFlow does not accept as a scope;
        when called, ``route`` returns an unknown name, or a reducer a list of another
        shape.
    """
    check_function(route=route)
    _check_reducers(reducers)
    return Dealer("partition", dict(reducers), partial(_reduce_partition, route))


def deal_out(
    names: Sequence[str], reducers: Mapping[str, Reducer], grads: Gradients
) -> list[list[Tensorlike]]:
    """Reduces gradient n by ``reducers[names[n]]``, in a scope of that name."""
    results: list[dict[int, Tensorlike]] = [{} for _ in grads]
    for name, reducer in reducers.items():
        positions = [n for n, own in enumerate(names) if own == name]
        if not positions:
            continue
        part = [[tower[n] for n in positions] for tower in grads]
        with tf.name_scope(name):
            reduced = reduced_by(reducer, Gradients(part, tests=grads.tests))
        for row, tower in zip(results, reduced, strict=True):
            row.update(zip(positions, tower, strict=True))
    return [[row[n] for n in range(len(names))] for row in results]


def _reduce_partition(
    route: Callable[[TensorInfo], str],
    reducers: Mapping[str, Reducer],
    grads: Gradients,
) -> list[list[Tensorlike]]:
    names = [route(info) for info in describe_columns(grads)]
    _check_names(names, reducers)
    return deal_out(names, reducers, grads)


def _check_reducers(reducers: Mapping[str, Reducer]) -> None:
    if not isinstance(reducers, Mapping):
        raise TypeError(
            f"partition: reducers must be a dict of reducers by name; got "
            f"{type(reducers).__name__}."
        )
    if not reducers:
        raise ValueError("partition: reducers is empty; pass at least one by name.")
    unfit = [
        name
        for name in reducers
        if not isinstance(name, str) or not _SCOPE.fullmatch(name)
    ]
    if unfit:
        raise ValueError(
            f"partition: names must be strings of letters, digits and ._-, which name "
            f"scopes of the graph; got {unfit}."
        )
    for reducer in reducers.values():
        check_reducer(reducer=reducer)


def _check_names(names: list[str], reducers: Mapping[str, Reducer]) -> None:
    unknown = [
        f"{n} ({name!r})" for n, name in enumerate(names) if name not in list(reducers)
    ]
    if unknown:
        raise ValueError(
            f"partition: route must name one of {sorted(reducers)}; it named others "
            f"for the gradients at {', '.join(unknown)}. Add a reducer of that name."
        )
