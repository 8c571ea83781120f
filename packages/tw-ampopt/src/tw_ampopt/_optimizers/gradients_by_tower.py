"""Gradients as callers in a ``tf.function`` bring them, checked, as [K][N][calls]."""

from collections.abc import Sequence
from typing import Any

from tw_ampopt._checks.gradients import check_gradients
from tw_ampopt._checks.pairs import check_pairs, list_of_pairs
from tw_ampopt._variables import identity, name_of


def gradients_by_tower(
    grads: Sequence[Any], variables: Sequence[Sequence[Any]], total: int, *, caller: str
) -> list[list[list[Any]]]:
    """Makes [K][N][1] of [K][N] gradients, or of [N] for one tower.

    Args:
      grads: tensors, sparse or not, and None.
      variables: [K][N], or [1][N] where towers share.
      total: K.
      caller: who asks; opens the message.

    Raises:
      TypeError: no list of gradients, or something that is no gradient.
      ValueError: other numbers of towers or gradients, other shapes, or no
        gradient at all.
    """
    if not isinstance(grads, Sequence) or isinstance(grads, str):
        raise TypeError(
            f"{caller}: wants [K][N] gradients, a list a tower; got {grads!r}."
        )
    nested = any(isinstance(tower, list | tuple) for tower in grads)
    if nested and not all(isinstance(tower, list | tuple) for tower in grads):
        raise TypeError(
            f"{caller}: wants [K][N] gradients, a list a tower; got lists and others: "
            f"{grads!r}."
        )
    towers = [list(tower) for tower in grads] if nested else [list(grads)]
    lists = list(variables) * (total if len(variables) == 1 else 1)
    counts, wanted = [len(t) for t in towers], [len(v) for v in lists]
    if counts != wanted:
        raise ValueError(
            f"{caller}: wants one gradient (or None) a variable from each of {total} "
            f"towers, {wanted} of them; got {counts}."
        )
    if all(grad is None for tower in towers for grad in tower):
        names = [name_of(v) for v in lists[0]]
        raise ValueError(
            f"{caller}: no gradient for any variable; got {names}. Does the loss "
            "depend on them?"
        )
    checked = check_gradients(towers, lists, caller=caller)
    return [[[grad] for grad in tower] for tower in checked]


def flatten_pairs(
    grads_and_vars: Sequence[Any],
    variables: Sequence[Sequence[Any]],
    total: int,
    *,
    caller: str,
) -> list[list[Any]]:
    """Makes [K][N] gradients of [N] or [K][N] pairs, in the order of ``variables``.

    Args:
      grads_and_vars: pairs of a gradient, or None, and a variable.
      variables: [K][N], or [1][N] where towers share.
      total: K.
      caller: who asks; opens the message.

    Raises:
      TypeError: something that is no pair, or no variable in one.
      ValueError: another number of towers, variables that the optimizer was not
        made for, or missing ones.
    """
    pairs = list_of_pairs(grads_and_vars, caller=caller)
    nested = bool(pairs) and all(isinstance(tower, list) for tower in pairs)
    towers = pairs if nested else [pairs]
    if len(towers) != total:
        raise ValueError(
            f"{caller}: wants (gradient, variable) pairs from each of {total} towers; "
            f"got them from {len(towers)}."
        )
    lists = list(variables) * (total if len(variables) == 1 else 1)
    grads = []
    for k, (tower, own) in enumerate(zip(towers, lists, strict=True)):
        by_identity = {
            identity(v): grad for grad, v in check_pairs(tower, caller=caller)
        }
        _check_same(by_identity, [v for _, v in tower], own, f"{caller}, tower {k}")
        grads.append([by_identity[identity(v)] for v in own])
    return grads


def _check_same(
    by_identity: dict[int, Any], came: Sequence[Any], own: Sequence[Any], caller: str
) -> None:
    known = set(map(identity, own))
    strangers = [name_of(v) for v in came if identity(v) not in known]
    missing = [name_of(v) for v in own if identity(v) not in by_identity]
    if strangers or missing:
        raise ValueError(
            f"{caller}: wants the variables that the optimizer was made for; got "
            f"{strangers} beside them, and misses {missing}. A variable without a "
            "gradient takes part with None."
        )
