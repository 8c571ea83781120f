"""Sending each gradient to the reducer that suits it."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core.internal import Gradients, check_function, tf_variables
from tw_reduce._checks import check_reducer
from tw_reduce._combinators.mean import Dealer, deal_out
from tw_reduce._reducer import Reducer, Tensorlike, is_stateful
from tw_reduce._tensor_info import TensorInfo, describe_columns

_Route = Callable[[TensorInfo], str]
_SCOPE = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.-]*")


def partition(
    route: Callable[[TensorInfo], str], reducers: Mapping[str, Any]
) -> Any:  # With memory or without, as the reducers are.
    """Makes a reducer that distributes the gradients among several others.

    For example sparse gradients to ``sum_balanced`` and dense ones to
    ``sum_collective``::

        partition(
            lambda info: "sparse" if info.is_sparse else "dense",
            {"sparse": balanced, "dense": collective},
        )

    Reducers with memory are chosen by variable; for example the last layer's kernel,
    of 10 columns, is sent whole::

        partition(
            lambda info: "whole" if info.shape[-1:] == (10,) else "thin",
            {"whole": None, "thin": power_sgd()},
        )

    Args:
      route: takes a gradient's info (sparse if any tower's is) and returns the name of
        its reducer. With memory, it takes the variables' infos, as memory is made.
      reducers: by name; each gets only its own gradients, in their order. All have
        memory, or none; beside those with memory, None sends gradients whole.

    Returns:
      A reducer, with memory if the others have some.

    Raises:
      TypeError: ``route`` or a reducer is not a function, ``reducers`` not a mapping,
        or only some reducers have memory.
      ValueError: no reducers, or a name that TensorFlow does not accept as a scope;
        when called, ``route`` returns an unknown name, or a reducer a list of another
        shape.
    """
    check_function(route=route)
    if _check_reducers(reducers):
        return _ByVariable(route, reducers)
    return Dealer("partition", dict(reducers), partial(_reduce_partition, route))


def _reduce_partition(
    route: _Route, reducers: Mapping[str, Reducer], grads: Gradients
) -> list[list[Tensorlike]]:
    return deal_out(_names(route, reducers, grads), reducers, grads)


def _names(route: _Route, reducers: Mapping[str, Any], rows: Any) -> list[str]:
    """Returns the names of the reducers of [N] gradients or variables."""
    names = [route(info) for info in describe_columns(rows)]
    unknown = [
        f"{n} ({own!r})" for n, own in enumerate(names) if own not in [*reducers]
    ]
    if unknown:
        raise ValueError(
            f"partition: route must name one of {sorted(reducers)}; it named others "
            f"at {', '.join(unknown)}. Add a reducer of that name."
        )
    return names


class _Whole:
    """Sends gradients as they are, among reducers with memory."""

    def init(self, variables: Sequence[Any]) -> list[Any]:
        """Returns no memory."""
        return [()] * len(variables)

    def update(self, grads: Any, states: Any, add: Reducer) -> Any:
        """Adds gradients."""
        return add(grads), states


class _ByVariable:
    """A reducer with memory that distributes variables among several others.

    A variable's memory is below the name of its reducer, by which an update finds it.
    One that has no memory keeps an empty tensor there, so that its name is kept.
    """

    def __init__(self, route: _Route, reducers: Mapping[str, Any]) -> None:
        self._route = route
        self._reducers: dict[str, Any] = {
            name: _Whole() if own is None else own for name, own in reducers.items()
        }
        # Without it memory starts from zero.
        if all(own is None or hasattr(own, "resize") for own in reducers.values()):
            self.resize = self._resize

    def init(self, variables: Sequence[Any]) -> list[Any]:
        """Returns memory by the names of the reducers."""
        names = _names(self._route, self._reducers, [tf_variables(variables)])
        found: dict[int, Any] = {}
        for name, places in _places(names):
            of_name = self._reducers[name].init([variables[n] for n in places])
            for n, own in zip(places, of_name, strict=True):
                found[n] = {name: [own, [] if tf.nest.flatten(own) else tf.zeros([0])]}
        return [found[n] for n in range(len(names))]

    def update(
        self, grads: Sequence[Sequence[tf.Tensor]], states: Any, add: Reducer
    ) -> tuple[list[list[Any]], ...]:
        """Updates by each reducer in turn, in a scope of its name."""
        sums: list[dict[int, Any]] = [{} for _ in grads]
        new: list[dict[int, Any]] = [{} for _ in grads]
        for name, places in _places([next(iter(own)) for own in states[0]]):
            part = [[tower[m] for m in places] for tower in grads]
            old = [[tower[m][name] for m in places] for tower in states]
            memory = [[own for own, _ in tower] for tower in old]
            with tf.name_scope(name):
                reduced, kept = self._reducers[name].update(part, memory, add)
            for k, tower in enumerate(old):
                sums[k] |= zip(places, reduced[k], strict=True)
                for m, own, (_, empty) in zip(places, kept[k], tower, strict=True):
                    new[k][m] = {name: [own, empty]}
        every = range(len(grads[0]))
        return tuple([[own[m] for m in every] for own in of] for of in (sums, new))

    def _resize(self, states: Sequence[Any], count: int) -> list[Any]:
        """Divides a variable's memory among ``count`` towers, as its reducer does."""
        ((name, (first, empty)),) = states[0].items()
        if not tf.nest.flatten(first):
            return [states[0]] * count
        memory = [own[name][0] for own in states]
        divided = self._reducers[name].resize(memory, count)
        return [{name: [own, empty]} for own in divided]


def _places(names: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Returns the places of each name, in the order in which names appear first."""
    return [
        (name, [n for n, own in enumerate(names) if own == name])
        for name in dict.fromkeys(names)
    ]


def _check_reducers(reducers: Mapping[str, Any]) -> bool:
    """Refuses reducers that cannot be distributed; returns whether they have memory."""
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
    remembers = any(map(is_stateful, reducers.values()))
    plain = {name: own for name, own in reducers.items() if not is_stateful(own)}
    for reducer in plain.values():
        if not (remembers and reducer is None):
            check_reducer(reducer=reducer)
    forgetful = [name for name, own in plain.items() if own is not None]
    if remembers and forgetful:
        raise TypeError(
            "partition: all reducers must have memory, or none, as those without do "
            f"not add over other processes; got {forgetful} without. None in place of "
            "one sends gradients whole."
        )
    return remembers
