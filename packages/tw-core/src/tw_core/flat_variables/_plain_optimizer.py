"""A flat model's optimizer, presented as one of the model's own variables.

Checkpoints and Keras files store an optimizer's state variable by variable. The
optimizer made here for them has no memory of its own: its slots are views of the slots
of flat variables.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tw_core._variable_kinds import tf_variable
from tw_core.checks import check_function, public
from tw_core.flat_variables._flat_variable import FlatVariable
from tw_core.flat_variables._flat_variables import flat_variable_of, view_of
from tw_core.flat_variables._model import FlatModel
from tw_core.flat_variables._view import VariableView

_T = TypeVar("_T")
_Place = tuple[int, VariableView | None]


@public
def plain_optimizer(
    optimizer: _T, get_opt_fn: Callable[[], _T], model: FlatModel[Any]
) -> _T:
    """Makes an optimizer for checkpoints from the optimizer of flat variables.

    Args:
      optimizer: of ``tf.compat.v1.train`` or Keras 3, with its state for
        ``model.trainable_variables``.
      get_opt_fn: returns a new optimizer of the same kind.
      model: the model whose flat variables ``optimizer`` updates.

    Returns:
      An optimizer of ``model.model.trainable_variables``, for ``tf.train.Checkpoint``
      or ``model.model.compile``. It reads and writes the state of ``optimizer``.

    Raises:
      TypeError: an optimizer of another kind, or ``get_opt_fn`` returns another class.
      ValueError: the optimizer has no state yet.
    """
    check_function(get_opt_fn=get_opt_fn)
    if not isinstance(model, FlatModel):
        raise TypeError(
            f"plain_optimizer: model must be what flatten returned; got {model!r}."
        )
    made = get_opt_fn()
    if type(made) is not type(optimizer):
        raise TypeError(
            f"plain_optimizer: get_opt_fn must return a {type(optimizer).__name__}, "
            f"which is to be saved; got {type(made).__name__}."
        )
    flat, plain = model.trainable_variables, model.plain_variables
    places = _places(flat, plain)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        _share_v1(optimizer, made, flat, plain, places)
    elif any(b.__module__.split(".")[0] == "keras" for b in type(optimizer).__mro__):
        _share_keras(optimizer, made, plain, places)
    else:
        raise TypeError(
            "plain_optimizer: knows optimizers of tf.compat.v1.train and Keras 3; got "
            f"{type(optimizer).__name__}."
        )
    return made


def _places(flat: Sequence[Any], plain: Sequence[Any]) -> list[_Place]:
    """Returns (index in ``flat``, view or None if unpacked) of each plain variable."""
    number = {id(tf_variable(v)): n for n, v in enumerate(flat)}
    found: list[_Place] = []
    for variable in plain:
        view = view_of(variable)
        if view is None or view.flat is None:
            found.append((number[id(tf_variable(variable))], None))
        else:
            found.append((number[id(view.flat.variable)], view))
    return found


def _share_keras(
    optimizer: Any, made: Any, plain: Sequence[Any], places: Sequence[_Place]
) -> None:
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        _share_keras(inner, made.inner_optimizer, plain, places)
    if not optimizer.built:
        raise ValueError(
            f"plain_optimizer: {type(optimizer).__name__} has no state yet; call "
            "make_optimizers(towers, get_opt_fn, replicas) first."
        )
    if not made.built:
        made.build(list(plain))
    state = {id(v) for v in optimizer.variables}
    shared = {id(v) for v in getattr(inner, "variables", ())}
    for name, theirs in vars(optimizer).items():
        own = vars(made).get(name)
        if id(theirs) in state:
            own._value = theirs.value
            shared.add(id(theirs))
        elif _are_slots(theirs, state) and len(own) == len(places):
            for slot, (n, view) in zip(own, places, strict=True):
                slot._value = _part_of(theirs[n].value, view)
            shared |= {id(v) for v in theirs}
    left = [v.path for v in optimizer.variables if id(v) not in shared]
    if left:
        raise TypeError(
            f"plain_optimizer: {type(optimizer).__name__} keeps {', '.join(left)} "
            "neither by itself nor in a list with one item per variable, so that it "
            "cannot be told whose part is whose; train it without flat variables "
            "(below_bytes=0)."
        )


def _are_slots(value: Any, state: set[int]) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    # The list of all state is not a list of slots.
    return is_list and 0 < len(value) < len(state) and {id(v) for v in value} <= state


def _share_v1(
    optimizer: Any,
    made: Any,
    flat: Sequence[Any],
    plain: Sequence[Any],
    places: Sequence[_Place],
) -> None:
    for name in optimizer.get_slot_names():
        for variable, (n, view) in zip(plain, places, strict=True):
            slot = optimizer.get_slot(tf_variable(flat[n]), name)
            if slot is not None:
                own = tf_variable(variable)
                made._slot_dict(name)[own._unique_id] = _part_of(slot, view)
    made._non_slot_dict.update(optimizer._non_slot_dict)


def _part_of(slot: tf.Variable, view: VariableView | None) -> tf.Variable:
    if view is None or view.flat is None:
        return slot
    known = flat_variable_of(slot) or FlatVariable(slot, view.flat.layout)
    return VariableView.of_part(known, view.number)
