"""An optimizer's slots of flat variables, saved part by part."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tw_core._modes import builds_session_graph
from tw_core._records.origins import base_name
from tw_core._variable_kinds import plain_name
from tw_core.flat_variables._flat_variable import FlatVariable
from tw_core.flat_variables._flat_variables import flat_among
from tw_core.flat_variables._layout import Layout, is_slot_name
from tw_core.flat_variables._opening import FLAT_KEY
from tw_core.flat_variables._session.collections import swap_in_collections


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
        name = plain_name(made)
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
    own, main = plain_name(flat), base_name(flat)
    if is_slot_name(name, own):
        return flat.layout.renamed(name, own)
    if is_slot_name(name, main):
        return flat.layout.renamed(name, main, prefix=own.removesuffix(main))
    return None
