"""Training with flat variables, which pack a model's small variables.

While a step is traced, a tower's model lists its flat variables as trainable, so that a
``train_step`` differentiates with respect to them. A second optimizer applies updates;
the compiled one, which is saved, has views of its state.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import tensorflow as tf

from tw_core import Tower
from tw_core.flat_variables import FlatModel, flatten
from tw_core.internal import create_slots, may_meet
from tw_keras._updates.sharded import build_for_owners

_TRAINED = ("trainable_variables", "trainable_weights")


class FlatTraining:
    """Trains K copies with flat variables."""

    def __init__(
        self, make_model: Callable[[], Any], towers: Sequence[Tower], below_bytes: int
    ) -> None:
        """Makes the copies, each on its tower's device."""
        self._towers = towers
        self.flats: list[FlatModel[Any]] = []  # the models with flat variables
        for tower in towers:
            with tf.device(tower.device):
                self.flats.append(flatten(make_model, below_bytes=below_bytes))
        self.models = [flat.model for flat in self.flats]
        self.optimizer: Any = None  # the one that applies; None before ``use``

    def use(self, optimizer: Any, *, sharded: bool) -> None:
        """Makes the optimizer that applies; ``optimizer``, unbuilt, views its state.

        With ``sharded`` its slots are with each variable's owner.
        """
        if optimizer.built:
            raise ValueError(
                f"TowerModel: {type(optimizer).__name__} is already built, and its "
                "slots are not flat; compile with a new one."
            )
        trained = [flat.trainable_variables for flat in self.flats]
        self.optimizer = type(optimizer).from_config(optimizer.get_config())
        if sharded:
            build_for_owners(self.optimizer, self._towers, trained)
        else:
            with tf.device(self._towers[0].device):
                create_slots(self.optimizer, trained[0])
        _show_state(self.optimizer, optimizer, self.flats[0])

    @contextmanager
    def training(self) -> Iterator[None]:
        """Makes the models list their flat variables, in a tower's step."""
        trained = {id(flat.model): flat.trainable_variables for flat in self.flats}
        flats = {id(flat.model): flat for flat in self.flats}
        kind: Any = type(self.models[0])
        names = (*_TRAINED, "losses", "__call__")
        before = {name: vars(kind).get(name) for name in names}
        for name in _TRAINED:
            setattr(kind, name, _listing(getattr(kind, name), trained))
        kind.losses = _of_plain(kind.losses, trained)
        kind.__call__ = _reading(kind.__call__, flats)
        try:
            yield
        finally:
            for name, own in before.items():
                if own is None:
                    delattr(kind, name)
                else:
                    setattr(kind, name, own)


def _reading(call: Any, flats: dict[int, FlatModel[Any]]) -> Callable[..., Any]:
    """Makes a model's call read each flat variable once, as a tape records it."""

    def read_and_call(model: Any, *arguments: Any, **named: Any) -> Any:
        flat = flats.get(id(model))
        with nullcontext() if flat is None else flat.reading():
            return call(model, *arguments, **named)

    return read_and_call


def _of_plain(losses: Any, trained: dict[int, list[Any]]) -> property:
    """Computes losses over the plain variables, which have the regularizers."""

    def own_losses(model: Any) -> Any:
        held = trained.pop(id(model), None)
        try:
            return losses.fget(model)
        finally:
            if held is not None:
                trained[id(model)] = held

    return property(own_losses)


def _listing(plain: Any, trained: dict[int, list[Any]]) -> property:
    def variables(model: Any) -> Any:
        if not may_meet() or id(model) not in trained:
            return plain.fget(model)
        return list(trained[id(model)])

    return property(variables)


def _show_state(optimizer: Any, shown: Any, model: FlatModel[Any]) -> None:
    """Makes ``shown``, of the same class, read and write the state of ``optimizer``.

    Files and checkpoints contain ``shown``: they store slots variable by variable.
    Keras has no public way to give an optimizer its state variables, so the value
    inside each of ``shown``'s is replaced.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        _show_state(inner, shown.inner_optimizer, model)
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
            "as an attribute nor in a list with one item per variable, so they "
            "cannot be divided among variables; train without flat variables "
            "(flat_below_bytes=0)."
        )


def _are_slots(value: Any, state: set[int]) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    # The list of all state is not a list of slots.
    return is_list and 0 < len(value) < len(state) and {id(v) for v in value} <= state
