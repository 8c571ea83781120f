"""Reduction of gradients for optimizers and tapes: one exchange per step."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_core.checks import caller, check_flag, check_number
from tw_core.gradients import weigh
from tw_core.modes import without_autograph
from tw_syncrep.horovod import _ops
from tw_syncrep.horovod._basics import (
    Average,
    ReduceOp,
    Sum,
    check_op,
    check_process_set,
    find_group,
)
from tw_syncrep.horovod.compression import Compression
from tw_syncrep.processes import mean_across, sum_across

Grads = Sequence[Any]
"""[N] dense, ``tf.IndexedSlices`` or None."""

_WIRES = {
    Compression.none: None,
    Compression.fp16: "float16",
    Compression.bf16: "bfloat16",
}


@dataclass(frozen=True)
class GradientReducer:
    """Reduces the gradients of a step over all ranks."""

    op: ReduceOp
    compression: Any
    sparse_as_dense: bool
    predivides: float  # divisor before the sum of a mean, multiplied back afterwards
    scales_local: bool  # whether local variables' are divided by the number of ranks

    @without_autograph
    def reduce(
        self, grads: Grads, variables: Sequence[Any], local: Mapping[int, Any]
    ) -> list[Any]:
        """Reduces [N] gradients, except those of ``local`` variables, which are by id.

        Ranks must agree on the variables' names.
        """
        group = find_group()
        results = self.densify(grads)
        if group.size == 1:
            return results
        own = [n for n, g in enumerate(results) if g is not None]
        shared = [n for n in own if id(variables[n]) not in local]
        if shared:
            names = [_name_of(variables[n]) for n in shared]
            reduced = self._reduce_shared([results[n] for n in shared], names)
            for n, grad in zip(shared, reduced, strict=True):
                results[n] = grad
        for n in set(own) - set(shared):
            if self.scales_local:
                results[n] = weigh(results[n], 1.0 / group.size)
        return results

    def densify(self, grads: Grads) -> list[Any]:
        """Makes sparse gradients dense if ``sparse_as_dense``."""
        return [
            tf.convert_to_tensor(g)
            if self.sparse_as_dense and isinstance(g, tf.IndexedSlices)
            else g
            for g in grads
        ]

    def _reduce_shared(self, grads: list[Any], names: list[str]) -> list[Any]:
        group = find_group()
        if self.op not in (Average, Sum):
            compression = self.compression
            return _ops.grouped_allreduce(grads, op=self.op, compression=compression)
        sent, contexts = list(grads), [None] * len(grads)
        if self.compression not in _WIRES:
            for n, grad in enumerate(grads):
                if not isinstance(grad, tf.IndexedSlices):
                    sent[n], contexts[n] = self.compression.compress(grad)
        combine = mean_across if self.op is Average else sum_across
        [reduced] = combine(
            [[weigh(g, 1.0 / self.predivides) for g in sent]],
            group=group,
            wire_dtype=_WIRES.get(self.compression),
            names=names,
        )
        reduced = [weigh(g, self.predivides) for g in reduced]
        if self.compression not in _WIRES:
            for n, grad in enumerate(reduced):
                if not isinstance(grad, tf.IndexedSlices):
                    reduced[n] = self.compression.decompress(grad, contexts[n])
        return reduced


def make_reducer(
    among: Sequence[ReduceOp],
    *,
    op: Any,
    compression: Any,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    num_groups: int,
    groups: Any,
    process_set: Any,
    scale_local_gradients: bool,
) -> GradientReducer:
    """Checks the arguments that Horovod's optimizers and tapes share.

    ``groups`` is checked but changes nothing, as all gradients travel together.
    """
    check_process_set(process_set)
    known = check_op(op, among)
    factor = gradient_predivide_factor
    check_number(above=0.0, gradient_predivide_factor=factor)
    check_flag(sparse_as_dense=sparse_as_dense)
    check_flag(scale_local_gradients=scale_local_gradients)
    if factor != 1.0 and known is not Average:
        raise ValueError(
            f"{caller()}: gradient_predivide_factor is for op Average; got {factor} "
            f"with {known.name}."
        )
    if num_groups:
        warnings.warn(
            f"{caller()}: num_groups is deprecated; pass groups.",
            DeprecationWarning,
            stacklevel=4,
        )
        groups = num_groups if groups is None else groups
    is_number = isinstance(groups, int) and groups > 0
    if not (groups is None or isinstance(groups, list) or is_number):
        raise ValueError(
            f"{caller()}: groups must be a positive number or a list of lists of "
            f"variables; got {groups!r}."
        )
    find_group()
    return GradientReducer(
        known, compression, sparse_as_dense, factor, scale_local_gradients
    )


def check_dense(grads: Grads) -> None:
    """Refuses sparse gradients, which cannot be added up over several passes."""
    sparse = [n for n, g in enumerate(grads) if isinstance(g, tf.IndexedSlices)]
    if sparse:
        raise ValueError(
            f"{caller()}: backward_passes_per_step above 1 adds dense gradients; at "
            f"positions {sparse} are tf.IndexedSlices: pass sparse_as_dense=True."
        )


def _name_of(variable: Any) -> str:
    if not hasattr(variable, "assign"):  # A tensor: its name may differ between ranks.
        return ""
    return str(getattr(variable, "path", None) or variable.name)
