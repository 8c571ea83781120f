"""How the towers' gradients become updates.

It depends on where the variables are: each tower has copies and an optimizer's state,
or copies each of which one tower updates for all, or all towers share one set. Where
small variables are packed into flat ones, a tower's model lists these as its trainable
ones while a step is traced, so that a ``train_step`` differentiates with respect to
them; the compiled optimizer is the one that is saved, with views of the state of the
one that applies.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tw_builders import apply_at_owners, apply_sharded_gradients, apply_shared_gradients
from tw_builders.internal import owned, owners_of, place_of
from tw_core import Tower, copy_to_replicas
from tw_core.flat_variables import FlatModel, flatten
from tw_core.gradients import values_of, weigh
from tw_core.optimizers import apply_pairs, create_slots
from tw_core.tracing import call_once, may_meet
from tw_core.variables import is_variable, tf_variable
from tw_keras import _batches
from tw_keras._checks import held_in
from tw_keras._flat_state import show_state
from tw_reduce import Reducer, mean


@dataclass(frozen=True)
class Brought:
    """A tower's arguments to its optimizer's ``apply``: [N] each, gradients or None.

    ``same_rows`` are the places of sparse gradients for the same rows in every tower.
    """

    grads: Sequence[Any]
    variables: Sequence[Any]
    same_rows: Sequence[int] = ()


@dataclass(frozen=True)
class Update:
    """One update by all towers."""

    towers: Sequence[Tower]
    optimizer: Any  # tower 0's
    states: Callable[[Any, Sequence[Any]], Sequence[Any]]  # the towers', made if needed
    weights: Sequence[Any] | None  # [K]; None for equal ones
    average: bool
    reducer: Reducer | None
    is_reduced: bool = False  # gradients are equal in all towers, to be applied as such


class OptimizerStates:
    """The variables that towers have for tower 0's optimizers.

    One optimizer serves all towers: traced with its own variables, its update is called
    with theirs.
    """

    def __init__(self, towers: Sequence[Tower]) -> None:
        self._towers = towers
        self._made: dict[int, list[Any]] = {}

    def of(self, optimizer: Any, variables: Sequence[Any]) -> list[Any]:
        """Returns [K] states, tower 0's being ``optimizer``; makes what is missing.

        ``variables`` are tower 0's, for an optimizer that is not built yet.
        """
        with tf.init_scope():
            with tf.device(self._towers[0].device):
                create_slots(optimizer, variables)
            states = self._made.setdefault(id(optimizer), [optimizer])
            if len(states) == 1:
                own = list(optimizer.variables)
                states += [_copies(own, tower) for tower in self._towers[1:]]
        return states

    def known(self, optimizer: Any) -> list[Any]:
        """Returns the states of an optimizer, which may have none yet."""
        return self._made.get(id(optimizer), [])

    def make_equal(self, optimizers: Sequence[Any]) -> None:
        """Copies tower 0's states to the other towers."""
        for optimizer in optimizers:
            states = self.known(optimizer)
            if len(states) > 1:
                own = [tf_variable(v) for v in optimizer.variables]
                copy_to_replicas([own, *(state.variables for state in states[1:])])


@dataclass(frozen=True, eq=False)
class _State:
    variables: list[tf.Variable]


def _copies(variables: Sequence[Any], tower: Tower) -> _State:
    with tf.device(tower.device):
        made = [
            tf.Variable(tf_variable(own).read_value(), trainable=own.trainable)
            for own in variables
        ]
    return _State(made)


def apply_replicated(update: Update, brought: Sequence[Brought]) -> None:
    """Every tower applies the reduced gradients to its copy.

    In a ``tf.function`` the optimizer is traced once and called with every tower's
    variables; eagerly tower 0 updates, and the others copy.
    """
    optimizer = update.optimizer
    states = update.states(optimizer, brought[0].variables)
    kept = _with_gradients(brought)
    reduced = [list(own.grads) for own in kept]
    reducer = update.reducer
    if not update.is_reduced and reducer is not None:
        if update.average:
            reducer = mean(reducer, weights=update.weights)
        reduced = [list(own) for own in reducer(reduced)]
    variables = [list(own.variables) for own in kept]

    def apply(optimizer: Any, grads: list[Any], variables: list[Any]) -> None:
        # Where data has ended, a call that is inlined runs what does not read it.
        waits = _batches.after([values_of(grad) for grad in grads])
        with waits, tf.name_scope("apply_gradients"):  # for timelines
            apply_pairs(optimizer, list(zip(grads, variables, strict=True)))

    if tf.executing_eagerly() or len(brought) == 1:
        with tf.device(update.towers[0].device):
            apply(optimizer, reduced[0], variables[0])
        copy_to_replicas(variables)
        return
    _follow_learning_rate(optimizer, states)
    call_once(
        apply,
        list(zip(states, reduced, variables, strict=True)),
        [tower.scope for tower in update.towers],
    )


def apply_sharded(update: Update, brought: Sequence[Brought]) -> None:
    """Each variable's owner applies the reduced gradient, and the others copy it."""
    optimizer = update.optimizer
    columns = [own.variables for own in brought]
    build_for_owners(optimizer, update.towers, columns)
    optimizer._check_variables_are_known(columns[0])  # else an error names the owners
    kept = _with_gradients(brought)
    grads, variables = [own.grads for own in kept], [own.variables for own in kept]
    with _taking_copies(optimizer, columns):
        if update.is_reduced:
            apply_at_owners(update.towers, grads, variables, optimizer)
            return
        apply_sharded_gradients(
            update.towers,
            grads,
            variables,
            optimizer,
            average=update.average,
            weights=update.weights,
        )


def build_for_owners(
    optimizer: Any, towers: Sequence[Tower], columns: Sequence[Sequence[Any]]
) -> None:
    """Builds an optimizer of tower 0's variables whose slots are with their owners.

    So Keras, callbacks and checkpoints find that of the plain model. Where it was built
    before, its slots move. ``columns`` is [K][N].
    """
    with tf.init_scope(), tf.device(towers[0].device):
        if optimizer.built:
            _move_slots(optimizer, towers)
            return
        owners = dict(zip(map(_key, columns[0]), owned(columns), strict=True))

        def beside_owner(make: Callable[..., Any]) -> Callable[..., Any]:
            def add(reference_variable: Any, *arguments: Any, **named: Any) -> Any:
                return make(owners[_key(reference_variable)], *arguments, **named)

            return add

        with _replaced(optimizer, "add_variable_from_reference", beside_owner):
            create_slots(optimizer, columns[0])


def _move_slots(optimizer: Any, towers: Sequence[Tower]) -> None:
    variables = optimizer._trainable_variables
    owners = owners_of(variables, len(towers))
    homes = {
        _key(own): towers[k].device for own, k in zip(variables, owners, strict=True)
    }
    for own in _with_inner(optimizer):
        trained = own._trainable_variables
        lists = [
            value
            for name, value in vars(own).items()
            if name not in ("_variables", "_trainable_variables")
            if isinstance(value, list) and len(value) == len(trained)
        ]
        for slots in lists:  # in the order of the variables
            for slot, variable in zip(slots, trained, strict=True):
                if isinstance(slot, keras.Variable):
                    _move(slot, homes[_key(variable)])


def _move(slot: Any, device: str) -> None:
    old = slot.value
    if place_of(old.device) == place_of(device):
        return
    with tf.device(device):
        slot._value = tf.Variable(
            old.read_value(), trainable=False, name=slot.name, dtype=old.dtype
        )


@contextmanager
def _taking_copies(optimizer: Any, columns: Sequence[Sequence[Any]]) -> Iterator[None]:
    """Has an optimizer of tower 0's variables take all towers' copies for them."""
    originals = {
        _key(copy): column[0]
        for column in zip(*columns, strict=True)
        for copy in column
    }

    def of_original(key: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda variable: key(originals.get(_key(variable), variable))

    with _replaced(optimizer, "_var_key", of_original):
        yield


@contextmanager
def _replaced(
    optimizer: Any, method: str, new: Callable[[Any], Callable[..., Any]]
) -> Iterator[None]:
    """Replaces a method of an optimizer and of those in it."""
    optimizers = _with_inner(optimizer)
    for own in optimizers:
        setattr(own, method, new(getattr(own, method)))
    try:
        yield
    finally:
        for own in optimizers:
            delattr(own, method)


def _with_inner(optimizer: Any) -> list[Any]:
    """Lists an optimizer and those in it, such as a ``LossScaleOptimizer``'s."""
    held = [leaf for value in vars(optimizer).values() for leaf in held_in(value)]
    inner = [own for own in held if isinstance(own, keras.optimizers.Optimizer)]
    found = [optimizer, *(more for own in inner for more in _with_inner(own))]
    return list({id(own): own for own in found}.values())


def _key(variable: Any) -> int:
    return id(tf_variable(variable))


def apply_shared(update: Update, brought: Sequence[Brought]) -> None:
    """The reduced gradients are applied once, where the variables live."""
    optimizer = update.optimizer
    with tf.init_scope():
        create_slots(optimizer, brought[0].variables)
    pairs = [
        list(zip(own.grads, own.variables, strict=True))
        for own in _with_gradients(brought)
    ]
    if update.is_reduced:
        pairs = pairs[:1]
    apply_shared_gradients(
        pairs, optimizer, average=update.average, weights=update.weights
    )


def apply_wrapped(update: Update, brought: Sequence[Brought]) -> None:
    """An optimizer over towers takes all gradients, and reduces them itself."""
    optimizer = update.optimizer
    with tf.device(update.towers[0].device):
        optimizer.wrapped.apply(
            [list(own.grads) for own in brought], weights=update.weights
        )
        optimizer.iterations.assign_add(1)


def with_rows_added(
    brought: Sequence[Brought], weights: Sequence[Any] | None
) -> Sequence[Brought]:
    """Adds up sparse gradients for the same rows, of which one tower brings the sum.

    A table of positions has a gradient for each position in every tower. Left apart,
    they would be repeated rows, which one device does not have.
    """
    if not brought[0].same_rows:
        return brought
    grads = [list(own.grads) for own in brought]
    for n in brought[0].same_rows:
        column = [own[n] for own in grads]
        for own, grad in zip(grads, _carried(column, weights), strict=True):
            own[n] = grad
    return [
        Brought(more, own.variables) for more, own in zip(grads, brought, strict=True)
    ]


def _carried(
    column: Sequence[tf.IndexedSlices], weights: Sequence[Any] | None
) -> list[tf.IndexedSlices]:
    """Returns [K] gradients, of which one has rows: the tower of the largest weight."""
    values = [grad.values for grad in column]
    if weights is None:
        carrier = tf.constant(0, tf.int64)
    else:
        shares = tf.stack([tf.cast(weight, tf.float64) for weight in weights])
        carrier = tf.argmax(shares)
        shares /= tf.reduce_max(shares)
        pairs = zip(values, tf.unstack(shares), strict=True)
        values = [weigh(own, share) for own, share in pairs]
    total = tf.add_n(values)
    carried = []
    for k, grad in enumerate(column):
        rows = tf.where(carrier == k, tf.shape(grad.indices)[0], 0)
        carried.append(
            tf.IndexedSlices(total[:rows], grad.indices[:rows], grad.dense_shape)
        )
    return carried


APPLY: dict[str, Callable[[Update, Sequence[Brought]], None]] = {
    "replicated": apply_replicated,
    "sharded": apply_sharded,
    "parameter_server": apply_shared,
}


def _with_gradients(brought: Sequence[Brought]) -> list[Brought]:
    """Leaves out the variables that have a gradient in no tower, as Keras does."""
    used = [
        n
        for n in range(len(brought[0].grads))
        if any(own.grads[n] is not None for own in brought)
    ]
    return [
        Brought([own.grads[n] for n in used], [own.variables[n] for n in used])
        for own in brought
    ]


def _follow_learning_rate(optimizer: Any, states: Sequence[Any]) -> None:
    """Copies the learning rate of tower 0's optimizer, which callbacks change."""
    rate = getattr(optimizer, "learning_rate", None)
    if not is_variable(rate):  # but a schedule of the iterations
        return
    for n, variable in enumerate(map(tf_variable, optimizer.variables)):
        if variable is tf_variable(rate):  # else a function's, which towers share
            for state in states[1:]:
                state.variables[n].assign(variable)


_TRAINED = ("trainable_variables", "trainable_weights")


class FlatTraining:
    """Trains K copies with flat variables."""

    def __init__(
        self, make_model: Callable[[], Any], towers: Sequence[Tower], below_bytes: int
    ) -> None:
        """Makes the copies, each on its tower's device."""
        self._towers = towers
        self._flats: list[FlatModel[Any]] = []
        for tower in towers:
            with tf.device(tower.device):
                self._flats.append(flatten(make_model, below_bytes=below_bytes))
        self.models = [flat.model for flat in self._flats]
        self.optimizer: Any = None  # the one that applies; None before ``use``

    def use(self, optimizer: Any, *, sharded: bool) -> None:
        """Makes the optimizer that applies; ``optimizer``, unbuilt, views its state.

        With ``sharded`` it has slots at each variable's owner.
        """
        if optimizer.built:
            raise ValueError(
                f"TowerModel: {type(optimizer).__name__} was built before, and its "
                "slots are not flat; compile with a new one."
            )
        trained = [flat.trainable_variables for flat in self._flats]
        self.optimizer = type(optimizer).from_config(optimizer.get_config())
        if sharded:
            build_for_owners(self.optimizer, self._towers, trained)
        else:
            with tf.device(self._towers[0].device):
                create_slots(self.optimizer, trained[0])
        show_state(self.optimizer, optimizer, self._flats[0])

    def make_equal(self) -> None:
        """Copies the values of tower 0's variables to all towers."""
        copy_to_replicas([flat.variables for flat in self._flats])

    @property
    def flats(self) -> list[Any]:
        """The towers' models with their flat variables."""
        return self._flats

    @contextmanager
    def training(self) -> Iterator[None]:
        """Makes the models list their flat variables, in a tower's step."""
        trained = {id(flat.model): flat.trainable_variables for flat in self._flats}
        flats = {id(flat.model): flat for flat in self._flats}
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
    """Makes a model read each of its flat variables once, where a tape records it."""

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
