"""Reducing many small gradients as one flat tensor per dtype.

A small tensor costs its dispatch, not its bytes. Packed, K transfers and one
addition serve all of them; a large tensor would only be copied twice more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import tensorflow as tf

from tw_core.checks import check_function, check_whole_number
from tw_reduce._checked_towers import CheckedTowers, checked_towers
from tw_reduce._combinators.combinator import Around
from tw_reduce._flat import cut, join
from tw_reduce._reducer import (
    Reducer,
    Tensorlike,
    TowerTensors,
    check_reduced,
)
from tw_reduce._tensor_info import TensorInfo, check_infos, describe_columns

DEFAULT_BELOW = 4_096  # elements; from here on a pack costs more than it saves


@dataclass(frozen=True)
class PackPlan:
    """Which gradients travel together.

    Attributes:
      packs: positions of the gradients in each pack, in their order; all of
        one dtype, dense and of known size.
      alone: positions that stay as they are.
    """

    packs: tuple[tuple[int, ...], ...]
    alone: tuple[int, ...]


def plan_packs(infos: Sequence[TensorInfo], *, below: int) -> PackPlan:
    """Groups the small dense gradients by dtype; a group of one stays alone.

    Args:
      infos: [N] of one tower.
      below: elements; gradients with fewer are packed.

    Returns:
      The plan; every position is in exactly one place of it.

    Raises:
      TypeError: ``below`` is no whole number; ``infos`` hold something else.
      ValueError: ``below`` is negative.
    """
    check_whole_number("plan_packs", below=below, at_least=0)
    check_infos(infos, caller="plan_packs")
    groups: dict[str, list[int]] = {}
    for info in infos:
        size = info.num_elements
        if size is not None and size < below and not info.is_sparse:
            groups.setdefault(info.dtype, []).append(info.index)
    packs = tuple(tuple(group) for group in groups.values() if len(group) > 1)
    packed_ones = {n for pack in packs for n in pack}
    alone = tuple(info.index for info in infos if info.index not in packed_ones)
    return PackPlan(packs, alone)


def packed(reducer: Reducer, *, below: int = DEFAULT_BELOW) -> Reducer:
    """Makes a reducer that joins small gradients before ``reducer`` sees them.

    Args:
      reducer: [K][N] -> [K][N]; gets the packs first, one flat tensor each,
        then the gradients that stay alone.
      below: elements; dense gradients with fewer travel packed, by dtype.
        Sparse ones and those of unknown size stay alone.

    Returns:
      A reducer. Packing happens on the device of the pack's first gradient,
      unpacking where the reduced pack lies; once, if all towers share it.

    Raises:
      TypeError: ``reducer`` is no function, ``below`` no whole number.
      ValueError: ``below`` is negative; when called, ``reducer`` returns
        another shape of list.
    """
    check_function("packed", reducer=reducer)
    check_whole_number("packed", below=below, at_least=0)
    return Around(reducer, partial(_reduce_packed, below))


def _reduce_packed(
    below: int, reducer: Reducer, grads: TowerTensors
) -> list[list[Tensorlike]]:
    grads = checked_towers(grads, caller="packed")
    plan = plan_packs(describe_columns(grads), below=below)
    if len(grads) == 1 or not plan.packs:
        return _reduce_as_is(reducer, grads)
    with tf.name_scope("pack"):
        joined = CheckedTowers((_pack(tower, plan) for tower in grads), grads.tests)
    reduced = reducer(joined)
    check_reduced(reduced, joined, caller="packed")
    with tf.name_scope("unpack"):
        return _unpack_towers(reduced, grads, plan)


def _reduce_as_is(reducer: Reducer, grads: TowerTensors) -> list[list[Tensorlike]]:
    reduced = reducer(grads)
    check_reduced(reduced, grads, caller="packed")
    return reduced


def _pack(tensors: Sequence[Tensorlike], plan: PackPlan) -> list[Tensorlike]:
    packs = []
    for positions in plan.packs:
        with tf.device(tensors[positions[0]].device):
            packs.append(join([tensors[n] for n in positions]))
    return [*packs, *(tensors[n] for n in plan.alone)]


def _unpack_towers(
    reduced: Sequence[Sequence[Tensorlike]], grads: TowerTensors, plan: PackPlan
) -> list[list[Tensorlike]]:
    done: dict[int, list[tf.Tensor]] = {}
    results = []
    for tower, like in zip(reduced, grads, strict=True):
        row: dict[int, Tensorlike] = {}
        for positions, pack in zip(plan.packs, tower, strict=False):
            if id(pack) not in done:
                with tf.device(pack.device):
                    done[id(pack)] = cut(pack, [like[n].shape for n in positions])
            row.update(zip(positions, done[id(pack)], strict=True))
        row.update(zip(plan.alone, tower[len(plan.packs) :], strict=True))
        results.append([row[n] for n in range(len(like))])
    return results
