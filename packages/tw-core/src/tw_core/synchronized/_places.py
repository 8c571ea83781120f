"""The towers of a build, and which of them is being built here."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import tensorflow as tf

from tw_core._records.origins import open_tower_scope
from tw_core._tf_compat import control_flow_context


class Joined(Protocol):
    """The towers of a build: built one after the other, or traced once for all."""

    total: int
    graph: tf.Graph | None  # None in eager mode
    context: Any  # of control flow, where the towers are built
    says: str  # why there are no sums without a graph
    reached: Any  # names of where they sum, if traced; see ``tracing.meet``

    def sum(self, place: "Place", tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Takes a tower's tensors; returns the totals, which can be differentiated."""

    def gather(self, place: "Place", tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Takes a tower's rows; returns those of all, which can be differentiated."""

    def updates(self, variable: Any, place: "Place") -> bool:
        """Returns whether this tower updates a variable for all towers."""


class Entered(threading.local):
    """The towers that this thread is building."""

    places: "tuple[Place, ...]" = ()  # the innermost last
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # per tower


entered = Entered()


@dataclass(frozen=True, eq=False)
class Place:
    """A tower that is being built."""

    joined: Joined
    index: int
    scope: str  # the name scope in which the tower was entered
    number: int | tf.Tensor  # the index, also where one trace serves all towers

    def name(self) -> str:
        """Names the layer that is being built, without the tower."""
        scope = tf.compat.v1.get_default_graph().get_name_scope()
        own = scope.removeprefix(self.scope).strip("/")
        own = re.sub(r"/?\b(sum_over_towers|gather)(_\d+)?$", "", own)
        return own or "(no name scope)"


@contextmanager
def inside(place: Place) -> Iterator[None]:
    """Builds a tower."""
    outer = entered.places
    entered.places = (*outer, place)
    try:
        with entered.around():
            yield
    finally:
        entered.places = outer


@contextmanager
def around_towers(make: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enters ``make()`` in every tower that this thread builds inside."""
    outer, entered.around = entered.around, make
    try:
        yield
    finally:
        entered.around = outer


@contextmanager
def refusing_sums(says: str) -> Iterator[None]:
    """Refuses sums over towers, and joined rows, with a RuntimeError that ``says``."""
    refused: Any = SimpleNamespace(total=2, graph=None, says=says, reached=None)
    with inside(Place(refused, 0, "", 0)):
        yield


def reached_sums() -> list[str]:
    """Returns the names, also later ones, of layers that the traced tower sums in."""
    every = [place.joined.reached for place in entered.places]
    return every[-1] if every and every[-1] is not None else []


def current_place() -> Place | None:
    """Returns the tower being built in this thread and graph; None outside towers."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    for place in reversed(entered.places):
        if place.joined.total == 1:
            return place
        if place.joined.graph is None:
            raise RuntimeError(place.joined.says)
        if graph is place.joined.graph:
            check_context(place.joined)
            return place
        if _is_around(place.joined.graph, graph):
            if place.joined.reached is not None:
                return place
            raise RuntimeError(
                "A sum over towers is in the body of a tf.cond, a loop or a function "
                f"inside tower{place.index}, which other towers cannot reach; build it "
                "in the tower itself."
            )
    scope = open_tower_scope()
    if scope is not None and scope.total > 1 and not entered.places:
        raise RuntimeError(
            f"tower{scope.index} is built by neither map_towers nor a builder, so the "
            "other towers are unknown; build all of them in "
            "tw_core.synchronized.joined_towers."
        )
    return None


def check_context(joined: Joined) -> None:
    if control_flow_context(joined.graph) is not joined.context:
        raise RuntimeError(
            "A sum over towers is in a branch or loop of a tower, which other towers "
            "cannot reach; build it in the tower itself."
        )


def _is_around(outer: tf.Graph, graph: tf.Graph | None) -> bool:
    while graph is not None and graph is not outer:
        graph = getattr(graph, "outer_graph", None)
    return graph is outer
