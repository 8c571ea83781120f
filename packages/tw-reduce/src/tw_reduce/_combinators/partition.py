"""Sending each gradient to the reducer that suits it."""

import re
from collections.abc import Callable, Mapping
from functools import partial

import tensorflow as tf

from tw_core.checks import check_function
from tw_reduce._checked_towers import CheckedTowers, checked_towers
from tw_reduce._combinators.combinator import Dealt
from tw_reduce._reducer import (
    Reducer,
    Tensorlike,
    TowerTensors,
    check_reduced,
)
from tw_reduce._tensor_info import TensorInfo, describe_columns

_SCOPE = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.-]*")


def routed(
    route: Callable[[TensorInfo], str], reducers: Mapping[str, Reducer]
) -> Reducer:
    """Makes a reducer that deals the gradients out to several.

    For example sparse gradients to ``sum_balanced`` and dense ones to
    ``sum_collective``::

        routed(
            lambda info: "sparse" if info.is_sparse else "dense",
            {"sparse": balanced, "dense": collective},
        )

    Args:
      route: looks at a gradient (sparse if any tower's is) and names its
        reducer.
      reducers: by name; each sees only its own gradients, in their order.

    Returns:
      A reducer.

    Raises:
      TypeError: ``route`` or a reducer is no function, ``reducers`` no mapping.
      ValueError: no reducers, or a name that TensorFlow does not take for a
        scope; when called, ``route`` gives an unknown name or
        a reducer returns another shape of list.
    """
    check_function("routed", route=route)
    _check_reducers(reducers)
    return Dealt(dict(reducers), partial(_reduce_routed, route))


def _reduce_routed(
    route: Callable[[TensorInfo], str],
    reducers: Mapping[str, Reducer],
    grads: TowerTensors,
) -> list[list[Tensorlike]]:
    grads = checked_towers(grads, caller="routed")
    names = [route(info) for info in describe_columns(grads)]
    _check_names(names, reducers)
    results: list[dict[int, Tensorlike]] = [{} for _ in grads]
    for name, reducer in reducers.items():
        positions = [n for n, own in enumerate(names) if own == name]
        if not positions:
            continue
        part = CheckedTowers(
            ([tower[n] for n in positions] for tower in grads), grads.tests
        )
        with tf.name_scope(name):
            reduced = reducer(part)
        check_reduced(reduced, part, caller=f"routed: {name}")
        for row, tower in zip(results, reduced, strict=True):
            row.update(zip(positions, tower, strict=True))
    return [[row[n] for n in range(len(names))] for row in results]


def _check_reducers(reducers: Mapping[str, Reducer]) -> None:
    if not isinstance(reducers, Mapping):
        raise TypeError(
            f"routed: reducers must be a dict of reducers by name; got "
            f"{type(reducers).__name__}."
        )
    if not reducers:
        raise ValueError("routed: reducers is empty; pass at least one by name.")
    unfit = [
        name
        for name in reducers
        if not isinstance(name, str) or not _SCOPE.fullmatch(name)
    ]
    if unfit:
        raise ValueError(
            f"routed: names must be strings of letters, digits and ._-, which name "
            f"scopes of the graph; got {unfit}."
        )
    for reducer in reducers.values():
        check_function("routed", reducer=reducer)


def _check_names(names: list[str], reducers: Mapping[str, Reducer]) -> None:
    unknown = [
        f"{n} ({name!r})" for n, name in enumerate(names) if name not in list(reducers)
    ]
    if unknown:
        raise ValueError(
            f"routed: route must name one of {sorted(reducers)}; it named others for "
            f"the gradients at {', '.join(unknown)}. Add a reducer of that name."
        )
