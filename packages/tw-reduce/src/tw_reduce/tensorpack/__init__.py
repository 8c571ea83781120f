"""tensorpack's all-reduce functions and packer, with their original interfaces."""

from tw_reduce.tensorpack._allreduce import (
    aggregate_grads_colocate,
    allreduce_grads,
    allreduce_grads_hierarchical,
    allreduce_grads_naive,
)
from tw_reduce.tensorpack._gradient_packer import GradientPacker

__all__ = [
    "GradientPacker",
    "aggregate_grads_colocate",
    "allreduce_grads",
    "allreduce_grads_hierarchical",
    "allreduce_grads_naive",
]
