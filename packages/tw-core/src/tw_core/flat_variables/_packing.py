"""Flat variables under an optimizer: gradients of views joined, slots saved by part."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tw_core._records.origins import base_name
from tw_core.checks import check_list, public
from tw_core.flat_packs import join
from tw_core.flat_variables._flat_variable import FlatVariable, describe_sparse
from tw_core.flat_variables._flat_variables import (
    FLAT_KEY,
    flat_among,
    swap_in_collections,
    views_of,
)
from tw_core.flat_variables._layout import Layout, is_slot_name
from tw_core.flat_variables._view import VariableView
from tw_core.modes import builds_session_graph, without_autograph


@public
@without_autograph
def pack_gradients(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Joins the gradients of views into those of their flat variables.

    In a session graph apply them with ``tw_core.optimizers.apply_pairs`` or a class of
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
    check_list(pairs=pairs, of="pairs", empty=True)
    others = [p for p in pairs if not isinstance(p, tuple | list) or len(p) != 2]
    if others:
        raise TypeError(
            f"pack_gradients: pairs must hold (gradient, variable) pairs; got {others}."
        )
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
            f"each; got another number for {', '.join(wrong)}. Leave those that do "
            "not train out of it with FlatVariables(group=...)."
        )
    sparse = [v.name for g, v in own if isinstance(g, tf.IndexedSlices)]
    if sparse:
        raise ValueError(f"pack_gradients: {describe_sparse(sparse)}")
    # Joined where they were computed, so that one tensor is sent.
    with tf.device(getattr(grads[0], "device", "") or flat.device):
        return join(grads), flat.variable


@contextmanager
def slots_like_parts(variables: Sequence[Any]) -> Iterator[None]:
    """Makes savers store an optimizer's slots of flat variables part by part.

    Args:
      variables: the variables that the optimizer updates inside, flat or not.
    """
    flats = flat_among(variables)
    if not flats or not builds_session_graph():
        yield
        return

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        made = next_creator(**kwargs)
        name = made.name.split(":")[0]
        for flat in flats:
            layout = _layout_of_slot(name, flat)
            if made.shape == flat.shape and layout is not None:
                slot = FlatVariable(made, layout)
                setattr(made, FLAT_KEY, slot)
                swap_in_collections(made.graph, made, slot)
        return made

    with tf.variable_creator_scope(create):
        yield


def _layout_of_slot(name: str, flat: FlatVariable) -> Layout | None:
    """Returns the layout of a slot of ``flat``; None if it is another variable's.

    The slot may be named after tower 0's variable, of which ``flat`` is a copy.
    """
    own, main = flat.name.split(":")[0], base_name(flat)
    if is_slot_name(name, own):
        return flat.layout.renamed(name, own)
    if is_slot_name(name, main):
        return flat.layout.renamed(name, main, prefix=own.removesuffix(main))
    return None
