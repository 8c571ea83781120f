"""Shows the state of flat variables' optimizer as that of the model's own variables."""

from collections.abc import Sequence
from typing import Any

from tw_core.flat_variables import FlatModel


def show_state(optimizer: Any, shown: Any, model: FlatModel[Any]) -> None:
    """Has ``shown``, of the same class, read and write the state of ``optimizer``.

    Files and checkpoints take ``shown``: they store slots variable by variable.
    Keras has no public way to give an optimizer the variables that hold its state, so
    each of ``shown``'s is made to stand for another one.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        show_state(inner, shown.inner_optimizer, model)
    plain = model.plain_variables
    if not shown.built:
        shown.build(list(plain))
    state = {id(v) for v in optimizer.variables}
    known = {id(v) for v in getattr(inner, "variables", ())}
    for name, theirs in vars(optimizer).items():
        own = vars(shown).get(name)
        if id(theirs) in state:
            own._value = theirs.value
            known.add(id(theirs))
        elif _are_slots(theirs, state) and len(own) == len(plain):
            views = model.view_slots([slot.value for slot in theirs])
            for slot, view in zip(own, views, strict=True):
                slot._value = view
            known |= {id(v) for v in theirs}
    left = [v.path for v in optimizer.variables if id(v) not in known]
    if left:
        raise TypeError(
            f"TowerModel: {type(optimizer).__name__} keeps {', '.join(left)} neither "
            "by itself nor in a list with one item per variable, so that it cannot be "
            "told whose part is whose; train without flat variables "
            "(flat_below_bytes=0)."
        )


def _are_slots(value: Any, state: set[int]) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    # The list of all state is not a list of slots.
    return is_list and 0 < len(value) < len(state) and {id(v) for v in value} <= state
