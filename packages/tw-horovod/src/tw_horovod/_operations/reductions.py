"""The reductions by name: how tensors of all ranks are combined."""

import enum
import warnings
from collections.abc import Sequence
from typing import Any

from tw_horovod._state.group import refuse


class ReduceOp(enum.IntEnum):
    """How tensors of all ranks are combined; the numbers are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product
ALL_OPS = (Average, Sum, Min, Max, Product)


def check_op(op: Any, among: Sequence[ReduceOp]) -> ReduceOp:
    """Returns ``op`` as a reduction, which must be in ``among``."""
    known = ", ".join(member.name for member in among)
    try:
        found = ReduceOp(op)
    except ValueError:
        raise ValueError(f"op must be one of {known}; got {op!r}.") from None
    if found not in among:
        refuse(f"op must be one of {known}; got {found.name}")
    return found


def choose_op(op: Any, average: bool | None) -> ReduceOp:
    """Returns the reduction given by ``op``, or by Horovod's older ``average``."""
    if average is None:
        return check_op(Average if op is None else op, ALL_OPS)
    if op is not None:
        raise ValueError(
            f"op and average must not both be given; got op={op!r} and "
            f"average={average!r}. Pass only op."
        )
    warnings.warn(
        "average is deprecated; pass op=hvd.Average or op=hvd.Sum.",
        DeprecationWarning,
        stacklevel=4,
    )
    return Average if average else Sum
