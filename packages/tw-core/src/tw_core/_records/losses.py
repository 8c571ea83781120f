"""The losses that a tower sees: its own, and its variables' regularization losses.

``tf.compat.v1.losses.get_total_loss`` adds up two collections of the graph, to which
every tower adds. So the losses of other towers are removed while a tower is built, and
restored afterwards. A variable's regularization loss is added when the variable is
made, and not when ``get_variable`` returns it again: where towers share variables, a
tower also sees the losses of the shared variables that it asks for.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tensorflow as tf

_REGULARIZATION = str(tf.compat.v1.GraphKeys.REGULARIZATION_LOSSES)
_KEYS = (str(tf.compat.v1.GraphKeys.LOSSES), _REGULARIZATION)
# Not a string, so that TensorFlow leaves the collection out of exported graphs.
_KEY = ("tw_core/losses_of_towers",)

_threads = threading.local()


@dataclass(eq=False)
class _Losses:
    """The losses that the towers of one graph have added."""

    owners: dict[int, tuple[Any, Hashable]] = field(default_factory=dict)  # by loss
    regularization: dict[int, tuple[Any, list[Any]]] = field(default_factory=dict)


@dataclass(eq=False)
class _Tower:
    """A tower that is being built."""

    graph: tf.Graph
    losses: _Losses
    before: list[Any]  # the graph's regularization losses, those of other towers too
    seen: int = 0  # of those in the collection
    last: Any = None  # the variable that was requested last
    shown: list[Any] = field(default_factory=list)  # its losses from other towers

    def note_losses(self) -> None:
        """Assigns regularization losses to the variable that was requested last.

        TensorFlow and Keras add them immediately, and give their ops the same names.
        """
        items = self.graph.get_collection(_REGULARIZATION)
        new = [own for own in items[self.seen :] if "/Regularizer/" in _name_of(own)]
        if new and self.shown:  # Keras adds them again for a view of a flat variable.
            items = _without(items, self.shown)
            _put(self.graph, _REGULARIZATION, items)
        elif new and self.last is not None:
            key = id(self.last)
            _, own = self.losses.regularization.setdefault(key, (self.last, []))
            own += _without(new, own)
        self.seen = len(items)

    def note_use(self, variable: Any) -> None:
        """Shows the regularization losses of a variable that the tower requested."""
        self.note_losses()
        _, known = self.losses.regularization.get(id(variable), (None, []))
        others = {id(own) for own in self.before}  # without those of a failed build
        self.shown = _without(
            [own for own in known if id(own) in others],
            self.graph.get_collection(_REGULARIZATION),
        )
        for loss in self.shown:
            self.graph.add_to_collection(_REGULARIZATION, loss)
        self.seen += len(self.shown)
        self.last = variable


def note_variable(variable: Any) -> None:
    """Notes that the tower being built requested a variable, new or not."""
    tower = _tower_here()
    if tower is not None:
        tower.note_use(variable)


def _tower_here() -> _Tower | None:
    tower: _Tower | None = getattr(_threads, "tower", None)
    is_here = tower is not None and tower.graph is tf.compat.v1.get_default_graph()
    return tower if is_here else None


@contextmanager
def own_losses(owner: Hashable) -> Iterator[None]:
    """Takes other towers' losses out of the graph's collections while open.

    Those of the same ``owner`` and those that no tower has added stay.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = {key: graph.get_collection(key) for key in _KEYS}
    tower = _Tower(graph, _losses_of(graph), before[_REGULARIZATION])
    outer, owners = getattr(_threads, "tower", None), tower.losses.owners
    for key, items in before.items():
        shown = [own for own in items if owners.get(id(own), (own, owner))[1] == owner]
        _put(graph, key, shown)
    tower.seen = len(graph.get_collection(_REGULARIZATION))
    _threads.tower = tower
    try:
        with _noting_variables():
            yield
    finally:
        _threads.tower = outer
        tower.note_losses()
        for key, items in before.items():
            new = _without(graph.get_collection(key), items)
            owners |= {id(own): (own, owner) for own in new}
            _put(graph, key, [*items, *new])


@contextmanager
def _noting_variables() -> Iterator[None]:
    # Not in a scope of its own, which would change the numbers of scopes inside.
    scope = tf.compat.v1.get_variable_scope()
    outer = scope.custom_getter

    def get(getter: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        tower = _tower_here()
        if tower is not None:
            tower.note_losses()
        own = getter if outer is None else partial(outer, getter)
        variable = own(*arguments, **named)
        if tower is not None:
            tower.last = variable  # the source of the new losses
            tower.note_use(variable)
        return variable

    scope.set_custom_getter(get)
    try:
        yield
    finally:
        scope.set_custom_getter(outer)


def _losses_of(graph: tf.Graph) -> _Losses:
    found: list[_Losses] = graph.get_collection_ref(_KEY)
    if not found:
        found.append(_Losses())
    return found[0]


def _name_of(loss: Any) -> str:
    return str(getattr(getattr(loss, "op", None), "name", ""))


def _without(items: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    known = {id(own) for own in others}
    return [own for own in items if id(own) not in known]


def _put(graph: tf.Graph, key: str, items: Sequence[Any]) -> None:
    # Asking for a collection creates it, and it is then exported.
    if len(items) != len(graph.get_collection(key)):
        graph.get_collection_ref(key)[:] = items
