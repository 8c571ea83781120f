"""Fewer transfers: small gradients joined before the sum, each sum copied once.

The cost of a small tensor is its dispatch, not its bytes. Packed, K transfers and one
addition serve all small tensors; a large one would only be copied twice more.
``packed(broadcast(...))`` sends each tower a pack, which is unpacked there, instead of
many small sums.
"""

from collections.abc import Sequence
from functools import partial

import tensorflow as tf

from tw_core.internal import (
    Gradients,
    PackPlan,
    check_whole_number,
    cut_flat,
    is_elementwise,
    join_flat,
)
from tw_reduce._checks import check_reducer
from tw_reduce._combinators.mean import Combinator, Move
from tw_reduce._reducer import Reducer, Tensorlike, TowerTensors, reduced_by
from tw_reduce._tensor_info import (
    TensorInfo,
    check_infos,
    describe_columns,
    packs_of,
)


def plan_packs(
    infos: Sequence[TensorInfo], *, below_bytes: int | None = None
) -> PackPlan:
    """Groups the small dense gradients by dtype; a group of one stays alone.

    Args:
      infos: [N] of one tower.
      below_bytes: gradients of fewer bytes are packed; None for those of fewer
        than 4,096 elements.

    Returns:
      The plan, in which every position occurs exactly once.

    Raises:
      TypeError: ``below_bytes`` is not a whole number, or an info not a ``TensorInfo``.
      ValueError: ``below_bytes`` is negative.
    """
    check_below_bytes(below_bytes)
    check_infos(infos)
    plan = packs_of(infos, below_bytes)
    index_of = [info.index for info in infos]
    packs = tuple(tuple(index_of[n] for n in pack) for pack in plan.packs)
    return PackPlan(packs, tuple(index_of[n] for n in plan.alone))


def check_below_bytes(below_bytes: int | None) -> None:
    """Refuses a threshold that is neither None nor a number of bytes."""
    if below_bytes is not None:
        check_whole_number(below_bytes=below_bytes, at_least=0)


def packed(reducer: Reducer, *, below_bytes: int | None = None) -> Reducer:
    """Makes a reducer that joins small gradients before ``reducer`` sees them.

    Args:
      reducer: [K][N] -> [K][N]; gets the packs first, one flat tensor each, then the
        gradients that stay alone. A reducer that is not marked as
        ``tw_reduce.reducers.elementwise`` may need whole gradients, and gets all of
        them unpacked.
      below_bytes: dense gradients of fewer bytes are packed, by dtype; None for those
        of fewer than 4,096 elements. Sparse ones and those of unknown size stay alone.
        Under ``mean``, float16 counts as float32, in which it is added.

    Returns:
      A reducer. It packs on the device of the pack's first gradient, and unpacks on
      that of the reduced pack; only once if all towers share it.

    Raises:
      TypeError: ``reducer`` is not a function, ``below_bytes`` not a whole number.
      ValueError: ``below_bytes`` is negative; when called, ``reducer`` returns
        a list of another shape.
    """
    check_reducer(reducer=reducer)
    check_below_bytes(below_bytes)
    return packing(reducer, below_bytes)


def packing(
    reducer: Reducer, below_bytes: int | None, *, copies: bool = False
) -> Combinator:
    """As ``packed``, for checked arguments, around ``broadcast`` if it ``copies``."""
    joins = is_elementwise(reducer)
    if copies:
        reducer = Combinator("broadcast", reducer, _reduce_and_copy, joins=True)
    move: Move = partial(_reduce_packed, below_bytes) if joins else reduced_by
    return Combinator("packed", reducer, move, joins=True)


def broadcast(reducer: Reducer) -> Reducer:
    """Makes a reducer that copies the results to each tower's own device.

    ``packed(broadcast(sum_balanced))`` suits replicated training with many small
    variables.

    Args:
      reducer: [K][N] -> [K][N]; may return the same tensor for several towers.

    Returns:
      A reducer; result n of tower k is on the device of ``grads[k][n]``, and
      towers on one device share it.

    Raises:
      TypeError: ``reducer`` is not a function.
      ValueError: when called, ``reducer`` returns a list of another shape.
    """
    check_reducer(reducer=reducer)
    return Combinator("broadcast", reducer, _reduce_and_copy, joins=True)


def _reduce_packed(
    below_bytes: int | None, reducer: Reducer, grads: Gradients
) -> list[list[Tensorlike]]:
    plan = packs_of(describe_columns(grads), below_bytes)
    if len(grads) == 1 or not plan.packs:
        return reduced_by(reducer, grads)
    with tf.name_scope("pack"):
        joined = [_pack(tower, plan) for tower in grads]
    reduced = reduced_by(reducer, Gradients(joined, tests=grads.tests))
    with tf.name_scope("unpack"):
        return _unpack_towers(reduced, grads, plan)


def _pack(tensors: Sequence[Tensorlike], plan: PackPlan) -> list[Tensorlike]:
    packs = []
    for positions in plan.packs:
        with tf.device(tensors[positions[0]].device):
            packs.append(join_flat([tensors[n] for n in positions], narrow=True))
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
                    done[id(pack)] = cut_flat(pack, [like[n].shape for n in positions])
            row.update(zip(positions, done[id(pack)], strict=True))
        row.update(zip(plan.alone, tower[len(plan.packs) :], strict=True))
        results.append([row[n] for n in range(len(like))])
    return results


def _reduce_and_copy(reducer: Reducer, grads: Gradients) -> list[list[Tensorlike]]:
    reduced = reduced_by(reducer, grads)
    copies: dict[tuple[int, str], Tensorlike] = {}
    with tf.name_scope("spread"):  # graphs keep the combinator's original name
        return [
            [
                _copy(tensor, own.device, copies)
                for tensor, own in zip(row, tower, strict=True)
            ]
            for row, tower in zip(reduced, grads, strict=True)
        ]


def _copy(
    tensor: Tensorlike, device: str, copies: dict[tuple[int, str], Tensorlike]
) -> Tensorlike:
    if tensor.device == device:
        return tensor
    key = (id(tensor), device)
    if key not in copies:
        with tf.device(device):
            copies[key] = tf.nest.map_structure(
                tf.identity, tensor, expand_composites=True
            )
    return copies[key]
