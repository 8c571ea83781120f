"""Gradient lists, ``[K][N]`` (gradient, variable) pairs, and sparse gradients.

K towers, N variables, always in that order.
"""

from tw_core._tf_compat import with_gradient
from tw_core.gradients._lists import (
    Gradient,
    GradList,
    list_pairs,
    merge_grad_list,
    split_grad_list,
)
from tw_core.gradients._reading import (
    Gradients,
    check_any_gradient,
    check_grad_list,
    check_gradients,
    check_replicated_grad_list,
    check_shared_grad_list,
    ensure_gradient_shapes,
    read_gradients,
    read_pairs,
)
from tw_core.gradients._rows import (
    add_rows,
    has_unique_rows,
    join_rows,
    split_rows,
)
from tw_core.gradients._values import (
    map_values,
    narrow_source,
    scale,
    sum_duplicate_rows,
    values_of,
    with_unique_rows,
)
from tw_core.gradients._weights import (
    check_weight,
    check_weights,
    power_of_two,
    shares_of,
    unit_of,
    weigh,
)

__all__ = [
    "GradList",
    "Gradient",
    "Gradients",
    "add_rows",
    "check_any_gradient",
    "check_grad_list",
    "check_gradients",
    "check_replicated_grad_list",
    "check_shared_grad_list",
    "check_weight",
    "check_weights",
    "ensure_gradient_shapes",
    "has_unique_rows",
    "join_rows",
    "list_pairs",
    "map_values",
    "merge_grad_list",
    "narrow_source",
    "power_of_two",
    "read_gradients",
    "read_pairs",
    "scale",
    "shares_of",
    "split_grad_list",
    "split_rows",
    "sum_duplicate_rows",
    "unit_of",
    "values_of",
    "weigh",
    "with_gradient",
    "with_unique_rows",
]
