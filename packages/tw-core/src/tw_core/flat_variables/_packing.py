"""The gradients of views, joined into those of their flat variables."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_core._flat_packs import join_flat
from tw_core._modes import without_autograph
from tw_core.flat_variables._flat_variable import FlatVariable, describe_sparse
from tw_core.flat_variables._flat_variables import views_of
from tw_core.flat_variables._view import VariableView
from tw_core.gradients._lists import list_pairs


@without_autograph
def pack_gradients(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Joins the gradients of views into those of their flat variables.

    In a session graph apply them with ``tw_core.internal.apply_pairs`` or a class of
    these packages, or within ``slots_like_parts``; otherwise a saver stores flat slots.

    Args:
      pairs: (gradient, variable) pairs of a model, for views and other variables,
        including Keras's.

    Returns:
      (gradient, variable) pairs of the flat variables, each where its first view was,
      and the pairs of the other variables unchanged.

    Raises:
      ValueError: a view of a flat variable has no gradient, two, or a sparse one, which
        many optimizers apply differently from a dense one.
      TypeError: ``pairs`` is not a list of pairs.
    """
    pairs = list_pairs("pairs", pairs)
    packed: dict[int, list[tuple[Any, VariableView]]] = {}
    order: list[tuple[Any, Any]] = []
    views = views_of([variable for _, variable in pairs])
    for (grad, variable), view in zip(pairs, views, strict=True):
        if view is None:
            order.append((grad, variable))
            continue
        if view.flat is None:
            raise ValueError(
                f"pack_gradients: the flat variable of {view.name} is made when the "
                "scope of FlatVariables is left; pack afterwards."
            )
        own = packed.setdefault(id(view.flat), [])
        if not own:
            order.append((own, view))
        own.append((grad, view))
    return [
        _packed(item, variable.flat) if isinstance(item, list) else (item, variable)
        for item, variable in order
    ]


def _packed(
    own: Sequence[tuple[Any, VariableView]], flat: FlatVariable
) -> tuple[tf.Tensor, tf.Variable]:
    counts = [0] * len(flat.layout.parts)
    grads: list[Any] = [None] * len(counts)
    for grad, view in own:
        counts[view.number] += grad is not None
        grads[view.number] = grad
    wrong = [
        f"{part.name} ({count})"
        for part, count in zip(flat.layout.parts, counts, strict=True)
        if count != 1
    ]
    if wrong:
        raise ValueError(
            f"pack_gradients: the variables of {flat.name} must have one gradient "
            f"each; got another number for {', '.join(wrong)}. Leave out those that "
            "do not train with FlatVariables(group=...)."
        )
    sparse = [v.name for g, v in own if isinstance(g, tf.IndexedSlices)]
    if sparse:
        raise ValueError(f"pack_gradients: {describe_sparse(sparse)}")
    # Joined where they were computed, so that one tensor is sent.
    with tf.device(getattr(grads[0], "device", "") or flat.device):
        return join_flat(grads), flat.variable
