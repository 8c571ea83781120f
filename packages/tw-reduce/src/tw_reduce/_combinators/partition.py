"""Sending each gradient to the reducer that suits it."""

import re
from collections.abc import Callable, Mapping
from functools import partial

from tw_core.internal import Gradients, check_function
from tw_reduce._checks import check_reducer
from tw_reduce._combinators.mean import Dealer, deal_out
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


def _reduce_partition(
    route: Callable[[TensorInfo], str],
    reducers: Mapping[str, Reducer],
    grads: Gradients,
) -> list[list[Tensorlike]]:
    names = [route(info) for info in describe_columns(grads)]
    unknown = [
        f"{n} ({own!r})" for n, own in enumerate(names) if own not in [*reducers]
    ]
    if unknown:
        raise ValueError(
            f"partition: route must name one of {sorted(reducers)}; it named others "
            f"for the gradients at {', '.join(unknown)}. Add a reducer of that name."
        )
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
