"""Reduction of gradients for optimizers and tapes: one exchange per step."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_core.internal import (
    check_flag,
    check_number,
    check_whole_number,
    weigh,
    without_autograph,
)
from tw_horovod._operations import ops
from tw_horovod._operations.reductions import Average, ReduceOp, Sum, check_op
from tw_horovod._state.group import find_group
from tw_horovod.compression import Compression
from tw_ranks import mean_across, sum_across
from tw_ranks.internal import name_of

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
    passes: int  # whose gradients an optimizer adds up before they are reduced
    share: float  # multiplies the reduced sums over passes

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
            # A tensor's name may differ between ranks.
            names = [
                name_of(variables[n]) if hasattr(variables[n], "assign") else ""
                for n in shared
            ]
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
            tf.convert_to_tensor(g) if self.sparse_as_dense and _is_sparse(g) else g
            for g in grads
        ]

    def _reduce_shared(self, grads: list[Any], names: list[str]) -> list[Any]:
        group = find_group()
        if self.op not in (Average, Sum):
            compression = self.compression
            return ops.grouped_allreduce(grads, op=self.op, compression=compression)
        own = Compression.none if self.compression in _WIRES else self.compression
        sent = [(g, None) if _is_sparse(g) else own.compress(g) for g in grads]
        combine = mean_across if self.op is Average else sum_across
        [reduced] = combine(
            [[weigh(g, 1.0 / self.predivides) for g, _ in sent]],
            group=group,
            wire_dtype=_WIRES.get(self.compression),
            names=names,
        )
        reduced = [weigh(g, self.predivides) for g in reduced]
        return [
            g if _is_sparse(g) else own.decompress(g, context)
            for g, (_, context) in zip(reduced, sent, strict=True)
        ]


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
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> GradientReducer:
    """Checks the arguments that Horovod's optimizers and tapes share.

    ``groups`` is checked but changes nothing, as all gradients are sent together.
    """
    find_group(process_set)
    known = check_op(op, among)
    factor = gradient_predivide_factor
    check_number(above=0.0, gradient_predivide_factor=factor)
    check_flag(sparse_as_dense=sparse_as_dense)
    check_flag(scale_local_gradients=scale_local_gradients)
    check_whole_number(backward_passes_per_step=backward_passes_per_step, at_least=1)
    check_flag(average_aggregated_gradients=average_aggregated_gradients)
    if factor != 1.0 and known is not Average:
        raise ValueError(
            f"gradient_predivide_factor is for op Average; got {factor} with "
            f"{known.name}."
        )
    if num_groups:
        warnings.warn(
            "num_groups is deprecated; pass groups.",
            DeprecationWarning,
            stacklevel=3,
        )
        groups = num_groups if groups is None else groups
    is_number = isinstance(groups, int) and groups > 0
    if not (groups is None or isinstance(groups, list) or is_number):
        raise ValueError(
            "groups must be a positive number or a list of lists of variables; got "
            f"{groups!r}."
        )
    return GradientReducer(
        known,
        compression,
        sparse_as_dense,
        factor,
        scale_local_gradients,
        backward_passes_per_step,
        1.0 / backward_passes_per_step if average_aggregated_gradients else 1.0,
    )


def check_dense(grads: Grads) -> None:
    """Refuses sparse gradients, which cannot be added up over several passes."""
    sparse = [n for n, g in enumerate(grads) if _is_sparse(g)]
    if sparse:
        raise ValueError(
            "backward_passes_per_step above 1 adds dense gradients; those at positions "
            f"{sparse} are tf.IndexedSlices: pass sparse_as_dense=True."
        )


def _is_sparse(grad: Any) -> bool:
    return isinstance(grad, tf.IndexedSlices)
