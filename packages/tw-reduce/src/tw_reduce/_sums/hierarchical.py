"""All-reduce in two levels: within groups of nearby devices, then between them.

The device that adds changes from variable to variable, so that all devices and
links share the work. Two groups of four give the layout that tensorpack's
``allreduce_grads_hierarchical`` uses for eight GPUs; any groups that hold every
tower once are accepted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import tensorflow as tf

from tw_core.internal import (
    check_list,
    check_whole_number,
    elementwise,
    without_autograph,
)
from tw_reduce._checks import addable, check_devices
from tw_reduce._reducer import Reducer, Tensorlike, TowerTensors, rows
from tw_reduce._sums.one_device import add_columns

Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""Towers by index, each in one group; e.g. those that share a fast link."""

EIGHT_GPU_CROSS: Groups = ((0, 1, 2, 3), (4, 5, 6, 7))
"""Two rings of four GPUs, crossed pairwise: tensorpack's layout for a DGX-1."""


@dataclass(frozen=True)
class HierarchyPlan:
    """The towers whose devices add one variable's gradients.

    Attributes:
      mains: for each group, the tower that adds up the group. Groups are in
        the order in which their sums are added.
      members: for each group in that order, its towers.
      root: the tower that adds the groups' sums.
    """

    mains: tuple[int, ...]
    members: Groups
    root: int


def plan_hierarchy(groups: Groups, index: int) -> HierarchyPlan:
    """Rotates the groups for the variable at position ``index``.

    Args:
      groups: every tower once.
      index: n.

    Returns:
      The plan: the lead rotates through all towers; each group's main is the tower
      in the lead's place; the main of the group after the lead's adds the total.

    Raises:
      TypeError: something other than whole numbers in groups.
      ValueError: no tower, an empty group, or a negative index.

    >>> plan_hierarchy(((0, 1), (2, 3)), 3)
    HierarchyPlan(mains=(3, 1), members=((2, 3), (0, 1)), root=1)
    """
    _check_nested(groups)
    check_whole_number(index=index, at_least=0)
    if not groups or not all(groups):
        raise ValueError(
            "plan_hierarchy: groups must hold towers, and none may be empty; got "
            f"{groups}. Pass e.g. ((0, 1), (2, 3))."
        )
    return _plan(groups, index)


def _plan(groups: Groups, index: int) -> HierarchyPlan:
    places = [
        (g, place) for g, group in enumerate(groups) for place in range(len(group))
    ]
    lead, place = places[index % len(places)]
    members = tuple(groups[lead:]) + tuple(groups[:lead])
    mains = tuple(group[place % len(group)] for group in members)
    return HierarchyPlan(mains, members, root=mains[1 % len(mains)])


def hierarchical(
    groups: Sequence[Sequence[int]], *, devices: Sequence[str] | None = None
) -> Reducer:
    """Makes a reducer that adds within groups first, then between them.

    Args:
      groups: tower indices; every tower in exactly one group, e.g.
        ``EIGHT_GPU_CROSS`` or ``[[0, 1], [2, 3]]``.
      devices: [K] the towers' devices; None uses each gradient's own.

    Returns:
      A reducer of sums, not means; each tower gets its own copy on its device.
      Sparse stays sparse.

    Raises:
      TypeError: something other than whole numbers in groups.
      ValueError: a group is empty, or a tower occurs twice; when called, groups
        that do not hold each tower once.
    """
    _check_nested(groups)
    settled = tuple(tuple(group) for group in groups)
    if devices is None:
        num_towers = sum(len(group) for group in settled)
        _check_groups(settled, num_towers, by="their own size")
    else:
        devices = check_devices(devices)
        _check_groups(settled, len(devices), by="the devices")
    return partial(_sum_hierarchical, settled, devices)


@elementwise
@without_autograph
def _sum_hierarchical(
    groups: Groups, devices: Sequence[str] | None, grads: TowerTensors
) -> list[list[Tensorlike]]:
    grads = addable(grads)
    _check_groups(groups, len(grads), by="the gradient lists")
    columns = list(zip(*grads, strict=True))
    places = [
        [tensor.device for tensor in column] if devices is None else list(devices)
        for column in columns
    ]
    plans = [_plan(groups, n) for n in range(len(grads[0]))]
    with tf.name_scope("hierarchical"):
        totals = _add_levels(columns, plans, places)
        shared = list(map(_copy_down, totals, plans, places))
    return rows(shared, len(grads))


def _add_levels(
    columns: Sequence[Sequence[Tensorlike]],
    plans: Sequence[HierarchyPlan],
    places: Sequence[Sequence[str]],
) -> list[Tensorlike]:
    near = [
        ([column[k] for k in group], place[main])
        for column, plan, place in zip(columns, plans, places, strict=True)
        for group, main in zip(plan.members, plan.mains, strict=True)
    ]
    parts = iter(add_columns([c for c, _ in near], [place for _, place in near]))
    far = [[next(parts) for _ in plan.mains] for plan in plans]
    roots = [place[plan.root] for plan, place in zip(plans, places, strict=True)]
    return add_columns(far, roots)


def _copy_down(
    total: Tensorlike, plan: HierarchyPlan, places: Sequence[str]
) -> list[Tensorlike]:
    copies: dict[int, Tensorlike] = {}
    for group, main in zip(plan.members, plan.mains, strict=True):
        near = total if main == plan.root else _copy_to(places[main], total)
        for k in group:
            copies[k] = near if k == main else _copy_to(places[k], near)
    return [copies[k] for k in range(len(copies))]


def _copy_to(device: str, tensor: Tensorlike) -> Tensorlike:
    with tf.device(device):
        return tf.identity(tensor)


def _check_nested(groups: Sequence[Sequence[int]]) -> None:
    check_list(groups=groups, of="groups of towers", empty=True)
    for group in groups:
        check_list(group=group, of="towers' indices", empty=True)
        for index in group:
            check_whole_number(index=index)


def _check_groups(groups: Groups, num_towers: int, *, by: str) -> None:
    counts = Counter(k for group in groups for k in group)
    twice = sorted(k for k, count in counts.items() if count > 1)
    missing = sorted(set(range(num_towers)) - set(counts))
    unknown = sorted(set(counts) - set(range(num_towers)))
    empty = [g for g, group in enumerate(groups) if not group]
    if twice or missing or unknown or empty or not groups:
        raise ValueError(
            f"hierarchical: groups must hold each of the {num_towers} towers "
            f"(by {by}) once; got {groups}: missing {missing}, twice {twice}, "
            f"unknown {unknown}, empty groups {empty}. Write e.g. [[0, 1], [2, 3]]."
        )
