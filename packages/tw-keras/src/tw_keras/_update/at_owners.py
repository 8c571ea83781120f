"""Placement of an update where one tower updates each variable, and the others copy it.

The one optimizer is built for tower 0's variables, like the plain model's, so that
Keras, callbacks and checkpoints work with it. Its slots are on the owners' devices, and
while it applies it treats each copy as tower 0's variable.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from tw_builders.internal import (
    check_homes,
    copy_from_owners,
    owned,
    owners_of,
    places_of,
)
from tw_core import Tower
from tw_core.internal import apply_by_keras, tf_variable, tf_variables
from tw_keras._keras_compat import (
    AVERAGING,
    VARIABLE_KEY,
    check_known,
    replace_value,
    replaced,
    slots_of,
    trained_by,
)
from tw_keras._update.gradients import Rows
from tw_keras._update.places import Terms, WithCopies


class AtOwners(WithCopies):
    """Each variable's owner applies the reduced gradient, and the others copy it."""

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the state with its owners, or moves it; of tower 0's variables."""
        _build(self._optimizer, self._towers, self._of_towers(variables))

    def targets(self, variables: Sequence[Any]) -> Rows:
        """Returns the [1][M] owners' variables."""
        return [owned(self._of_towers(variables), self._optimizer)]

    def apply(self, rows: Rows, variables: Sequence[Any], terms: Terms) -> None:
        """Updates the owners with [K][M] gradients, or [1][M], and copies to all."""
        columns = self._of_towers(variables)
        rows = rows if len(rows) == len(columns) else [*rows] * len(columns)
        # Else errors name owners.
        check_known(self._optimizer, columns[0])
        check_homes(self._towers, columns)
        grad_of = {
            id(variable): grad
            for row, own in zip(rows, columns, strict=True)
            for grad, variable in zip(row, own, strict=True)
        }
        owners = owned(columns, self._optimizer)
        pairs = [(grad_of[id(own)], own) for own in owners]
        taking_copies = _taking_copies(self._optimizer, columns, owners)
        with taking_copies, tf.device(self._towers[0].device):
            apply_by_keras(self._optimizer, pairs, jit_compile=terms.jit_compile)
        with tf.name_scope("copy_from_owners"):
            copy_from_owners(columns, owners, jit_compile=terms.jit_compile)


def _build(
    optimizer: Any, towers: Sequence[Tower], columns: Sequence[Sequence[Any]]
) -> None:
    """Builds an optimizer of tower 0's variables whose slots are with their owners.

    Keras, callbacks and checkpoints see the plain model's optimizer. If it is already
    built, its slots move. ``columns`` is [K][N].
    """
    with tf.init_scope(), tf.device(towers[0].device):
        if optimizer.built:
            _move_slots(optimizer, towers)
            return
        first = tf_variables(columns[0])
        owners = dict(zip(map(id, first), owned(columns), strict=True))

        def beside_owner(make: Callable[..., Any]) -> Callable[..., Any]:
            def add(reference_variable: Any, *arguments: Any, **named: Any) -> Any:
                return make(owners[_key(reference_variable)], *arguments, **named)

            return add

        with _replaced(optimizer, {"add_variable_from_reference": beside_owner}):
            optimizer.build(list(columns[0]))


def _move_slots(optimizer: Any, towers: Sequence[Tower]) -> None:
    variables = trained_by(optimizer)
    owners = owners_of(variables, len(towers))
    pairs = zip(tf_variables(variables), owners, strict=True)
    homes = {id(own): towers[k].device for own, k in pairs}
    placed = []
    for own in _with_inner(optimizer):
        trained = tf_variables(trained_by(own))
        for slots in slots_of(own):
            for slot, variable in zip(slots, trained, strict=True):
                if isinstance(slot, keras.Variable):
                    placed.append((slot, homes[id(variable)]))
    places = places_of(at for slot, home in placed for at in (slot.value.device, home))
    for slot, home in placed:
        if places[slot.value.device] != places[home]:
            _move(slot, home)


def _move(slot: Any, device: str) -> None:
    old = slot.value
    with tf.device(device):
        moved = tf.Variable(
            old.read_value(), trainable=False, name=slot.name, dtype=old.dtype
        )
    replace_value(slot, moved)


def _taking_copies(
    optimizer: Any, columns: Sequence[Sequence[Any]], owners: Sequence[Any]
) -> AbstractContextManager[None]:
    """Makes an optimizer treat all towers' copies as tower 0's variables."""
    plain = [tf_variables(own) for own in columns]
    originals = {
        id(copy): original
        for own in plain
        for copy, original in zip(own, columns[0], strict=True)
    }
    owner_of = dict(zip(map(id, plain[0]), owners, strict=True))

    def of_original(key: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda variable: key(originals.get(_key(variable), variable))

    def of_owners(average: Callable[[Any], Any]) -> Callable[[Any], Any]:
        # Its list has tower 0's variables, which get the new values later.
        return lambda variables: average([owner_of.get(_key(v), v) for v in variables])

    averaging = dict.fromkeys(AVERAGING, of_owners)
    return _replaced(optimizer, {VARIABLE_KEY: of_original, **averaging})


@contextmanager
def _replaced(
    optimizer: Any, methods: dict[str, Callable[[Any], Callable[..., Any]]]
) -> Iterator[None]:
    """Replaces methods of an optimizer and of those inside it."""
    with ExitStack() as stack:
        for own in _with_inner(optimizer):
            for name, new in methods.items():
                stack.enter_context(replaced(own, name, new))
        yield


def _with_inner(optimizer: Any) -> list[Any]:
    """Lists an optimizer and those inside it, such as a ``LossScaleOptimizer``'s."""
    held = [leaf for value in vars(optimizer).values() for leaf in held_in(value)]
    inner = [own for own in held if isinstance(own, keras.optimizers.Optimizer)]
    found = [optimizer, *(more for own in inner for more in _with_inner(own))]
    return list({id(own): own for own in found}.values())


def held_in(value: Any) -> list[Any]:
    """Lists the leaves of a container; any other value as a list of one."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in held_in(item)]
    return [value]


def _key(variable: Any) -> int:
    return id(tf_variable(variable))
