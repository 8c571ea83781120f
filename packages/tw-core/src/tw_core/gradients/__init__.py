"""Gradient lists, ``[K][N]`` (gradient, variable) pairs, and sparse gradients.

K towers, N variables, always in that order.
"""

from tw_core.gradients._lists import (
    Gradient,
    GradList,
    merge_grad_list,
    split_grad_list,
)
from tw_core.gradients._reading import (
    check_grad_list,
    check_replicated_grad_list,
    check_shared_grad_list,
)
from tw_core.gradients._values import sum_duplicate_rows

__all__ = [
    "GradList",
    "Gradient",
    "check_grad_list",
    "check_replicated_grad_list",
    "check_shared_grad_list",
    "merge_grad_list",
    "split_grad_list",
    "sum_duplicate_rows",
]
