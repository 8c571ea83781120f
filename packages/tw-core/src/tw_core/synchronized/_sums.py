"""Sums over towers that are built one after the other, in one graph.

Tower 0 needs the total before tower 1 has been built. It goes on with an op whose input
is a placeholder; when the last tower has brought its tensor, that op gets the sum of
all in its place. What is left is a plain ``AddN``: nothing has to meet at run time, so
nothing can hang. The gradient of a sum is the sum of what comes back to each tower, and
is joined in the same way, in whatever order towers are differentiated.

TensorFlow's own loops close their back edges like this (``Operation._update_input``).
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import tensorflow as tf

from tw_core._records.origins import open_tower_scope, without_numbers
from tw_core._tf_compat import control_flow_context, set_input, with_gradient
from tw_core.checks import check_whole_number
from tw_core.modes import compiles_with_xla, without_autograph
from tw_core.synchronized._cycles import check_order_of_effects

_T = TypeVar("_T")


class _Entered(threading.local):
    """What this thread is building.

    Attributes:
      places: the towers, the innermost last.
      around: makes what is entered in every tower.
    """

    places: "tuple[Place, ...]" = ()
    around: Callable[[], AbstractContextManager[None]] = nullcontext


_entered = _Entered()


@without_autograph
def sum_over_towers(tensors: _T) -> _T:
    """Adds what all towers of a build bring, inside the function that builds a tower.

    The n-th call in one tower meets the n-th call in every other. A gradient goes
    through a sum as the sum of the gradients that come back to it in all towers: the
    gradients of tower k's loss are those of the sum of all towers' losses, for what
    tower k has brought. Differentiate the losses of all towers alike.

    Args:
      tensors: a tensor, or a structure of tensors as of ``tf.nest``, of the same
        dtypes and shapes in all towers.

    Returns:
      The sums in the same structure, made on tower 0's device. Outside of towers, and
      where there is one, ``tensors`` as it came.

    Raises:
      ValueError: another layer, structure, dtype or shape than tower 0 brings here; on
        leaving a tower, other sums than tower 0's.
      RuntimeError: in eager mode; in the body of a ``tf.cond``, a loop or a function
        that a tower builds; or in a tower that neither ``map_towers`` nor a builder
        builds.
    """
    place = current_place("sum_over_towers")
    if place is None or place.joined.total == 1:
        return tensors
    flat = [tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(tensors)]
    with tf.name_scope("sum_over_towers"):
        sums = place.joined.next_sum(place, flat).join(place.index, flat)
    return cast(_T, tf.nest.pack_sequence_as(tensors, sums))


@contextmanager
def joined_towers(total: int) -> Iterator["JoinedTowers"]:
    """Has ``sum_over_towers`` meet in the towers that are built inside.

    For code that builds towers without ``map_towers``; each in ``.tower(k)``, tower 0
    first, all in the current graph::

        with joined_towers(2) as joined:
            for k in range(2):
                with tf.device(f"/gpu:{k}"), joined.tower(k):
                    build()

    Args:
      total: number of towers, at least 1.

    Raises:
      TypeError: ``total`` is not a whole number.
      ValueError: ``total`` is below 1.
    """
    joined = JoinedTowers(check_whole_number("joined_towers", total=total, at_least=1))
    yield joined
    joined.close()


class JoinedTowers:
    """The sums of one build of towers; ``joined_towers`` makes it.

    Attributes:
      total: number of towers.
      graph: that they are built in; None in eager mode, where nothing is summed.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        eager = tf.executing_eagerly()
        self.graph = None if eager else tf.compat.v1.get_default_graph()
        self.context = None if self.graph is None else control_flow_context(self.graph)
        self._sums: list[_Sum] = []
        self._counts: Counter[int] = Counter()
        self._updated_by: dict[Any, int] = {}
        self._first_op = 0

    @contextmanager
    def tower(self, index: int) -> Iterator[None]:
        """Marks what is built inside as tower ``index``.

        Args:
          index: 0 to total - 1, each once and in this order.

        Raises:
          ValueError: an index out of range; on leaving, the tower has reached other
            sums than tower 0 has.
          TypeError: ``index`` is not a whole number.
        """
        check_whole_number("joined_towers", index=index, at_least=0)
        if index >= self.total:
            raise ValueError(
                f"joined_towers: index must be below total={self.total}; got {index}."
            )
        scope = "" if self.graph is None else self.graph.get_name_scope()
        outer = _entered.places
        _entered.places = (*outer, Place(self, index, scope))
        try:
            with _entered.around():
                yield
        finally:
            _entered.places = outer
        self._check_reached(index)

    def next_sum(self, place: "Place", tensors: Sequence[tf.Tensor]) -> "_Sum":
        """Returns the sum that a tower has come to, which tower 0 begins."""
        n = self._counts[place.index]
        self._counts[place.index] += 1
        name = place.name()
        if not self._sums and self.graph is not None:
            self._first_op = len(self.graph.get_operations())
        if n == len(self._sums):
            self._sums.append(_Sum(self, name, begun_by=place.index))
        reached = self._sums[n]
        reached.check_same(place.index, name, tensors, self._sums)
        return reached

    def updates(self, variable: Any, index: int) -> bool:
        """Returns whether a tower updates a variable, which the first that asks does.

        Towers that share a variable would each move an average on.
        """
        return self._updated_by.setdefault(variable.ref(), index) == index

    def close(self) -> None:
        """Checks that the order of effects lets the sums be made."""
        if self._sums and self.graph is not None:
            check_order_of_effects(self.graph.get_operations()[self._first_op :])

    def _check_reached(self, index: int) -> None:
        every = [one for reached in self._sums for one in reached.with_gradients()]
        missing = [
            one.name for one in every if 0 in one.parts and index not in one.parts
        ]
        more = [one.name for one in every if 0 not in one.parts and index in one.parts]
        if missing or more:
            raise ValueError(
                "sum_over_towers: every tower must come to the same sums; "
                f"tower{index} has not come to {missing} of tower0, and tower0 not to "
                f"{more} of tower{index}. Build the same synchronised layers in every "
                "tower, in one order, and differentiate all towers alike."
            )


@dataclass(frozen=True, eq=False)
class Place:
    """A tower that is being built.

    Attributes:
      joined: the build.
      index: of the tower.
      scope: the name scope in which it was entered.
    """

    joined: JoinedTowers
    index: int
    scope: str

    def name(self) -> str:
        """Names the layer that is being built, without the tower."""
        scope = tf.compat.v1.get_default_graph().get_name_scope()
        own = scope.removeprefix(self.scope).strip("/")
        return own.removesuffix("sum_over_towers").rstrip("/") or "(no name scope)"


@contextmanager
def around_towers(make: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Has ``make()`` entered in every tower that this thread builds inside."""
    outer, _entered.around = _entered.around, make
    try:
        yield
    finally:
        _entered.around = outer


def current_place(caller: str) -> Place | None:
    """Finds the tower that is being built in this thread and graph.

    Args:
      caller: the public name that was called; opens the message.

    Returns:
      None outside of towers.

    Raises:
      RuntimeError: inside a tower where nothing can be summed.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    for place in reversed(_entered.places):
        if place.joined.total == 1:
            return place
        if place.joined.graph is None:
            raise RuntimeError(
                f"{caller}: towers are built one after the other, which eager mode "
                "computes at once; call map_towers inside a tf.function. A tf.function "
                "for each tower does not do."
            )
        if graph is place.joined.graph:
            _check_context(caller, place.joined)
            return place
        if _is_around(place.joined.graph, graph):
            raise RuntimeError(
                f"{caller}: was called in the body of a tf.cond, a loop or a function "
                f"inside tower{place.index}, which other towers cannot reach; call it "
                "in the tower itself."
            )
    scope = open_tower_scope()
    if scope is not None and scope.total > 1 and not _entered.places:
        raise RuntimeError(
            f"{caller}: tower{scope.index} is built by neither map_towers nor a "
            "builder, so that other towers cannot be found; build all of them in "
            "tw_core.synchronized.joined_towers."
        )
    return None


@dataclass(eq=False)
class _Sum:
    """One sum: what has come to it so far, and what the towers go on with.

    Attributes:
      joined: the build.
      name: of the layer, in the tower that begins.
      begun_by: the index of that tower.
      parts: index of a tower -> what it has brought.
      totals: what all go on with; their inputs are placeholders until all have come.
      gradients: the sums of what comes back, one each time towers are differentiated.
      counts: index of a tower -> how often it was differentiated.
    """

    joined: JoinedTowers
    name: str
    begun_by: int
    parts: dict[int, list[tf.Tensor]] = field(default_factory=dict)
    totals: list[tf.Tensor] = field(default_factory=list)
    gradients: "list[_Sum]" = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)

    def join(self, index: int, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Adds a tower's part, and returns the totals, which can be differentiated."""
        if not self.parts:
            self.totals = [_later(tensor) for tensor in tensors]
        self.parts[index] = tensors
        if len(self.parts) == self.joined.total:
            self._close()
        return self._differentiable(index, tensors)

    def check_same(
        self, index: int, name: str, tensors: Sequence[tf.Tensor], sums: "list[_Sum]"
    ) -> None:
        """Refuses what does not fit to what the first tower has brought."""
        if not self.parts:
            return
        begun = self.parts[self.begun_by]
        fit = len(begun) == len(tensors) and all(
            own.dtype == other.dtype and own.shape.is_compatible_with(other.shape)
            for own, other in zip(begun, tensors, strict=True)
        )
        if fit and not self._is_another(name, sums):
            return
        raise ValueError(
            f"sum_over_towers: towers must come to the same sums in the same order; "
            f"tower{self.begun_by} has come to {self.name!r} ({_described(begun)}), "
            f"tower{index} to {name!r} ({_described(tensors)}). Build the same layers "
            "in every tower, in one order."
        )

    def with_gradients(self) -> "Iterator[_Sum]":
        """Lists this sum, and those of its gradients of any order."""
        yield self
        for one in self.gradients:
            yield from one.with_gradients()

    def _is_another(self, name: str, sums: "list[_Sum]") -> bool:
        # Layers of one copy of a model for each tower are numbered on.
        if name == self.name:
            return False
        is_known = any(name == one.name for one in sums)
        return is_known or without_numbers(name) != without_numbers(self.name)

    def _close(self) -> None:
        columns = zip(*[self.parts[k] for k in sorted(self.parts)], strict=True)
        for total, column in zip(self.totals, columns, strict=True):
            with (
                total.graph.colocate_with(None, ignore_existing=True),
                tf.device(total.op.device),
            ):
                set_input(total.op, 0, tf.add_n(list(column)))

    def _differentiable(
        self, index: int, tensors: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        sums = list(self.totals)
        chosen = [n for n, t in enumerate(tensors) if _has_gradient(t)]
        if not chosen:
            return sums

        passed = with_gradient(
            [sums[n] for n in chosen],
            # Not the sums: their gradient would reach other towers through AddN.
            [tensors[n] for n in chosen],
            lambda *upstream: self._gradient(index, list(upstream)),
        )
        for n, total in zip(chosen, passed, strict=True):
            sums[n] = total
        return sums

    def _gradient(self, index: int, upstream: list[tf.Tensor]) -> list[tf.Tensor]:
        if tf.compat.v1.get_default_graph() is not self.joined.graph:
            raise RuntimeError(
                f"sum_over_towers: the gradient of {self.name!r} in tower{index} is "
                "taken in another graph, such as the body of a tf.cond, which other "
                "towers cannot reach; take it where the tower is built."
            )
        _check_context("sum_over_towers", self.joined)
        n = self.counts[index]
        self.counts[index] += 1
        if n == len(self.gradients):
            name = f"{self.name} (gradient)"
            self.gradients.append(_Sum(self.joined, name, begun_by=index))
        with tf.name_scope("sum_over_towers_gradient"):
            return self.gradients[n].join(index, upstream)


def _later(tensor: tf.Tensor) -> tf.Tensor:
    """Returns an op of which the input is to be replaced."""
    if not compiles_with_xla():
        name = "waits_for_all_towers"  # as an error says if one never comes
        hole = tf.compat.v1.placeholder(tensor.dtype, tensor.shape, name=name)
    elif _has_gradient(tensor):  # XLA compiles no placeholder, not even an unused one
        hole = tensor * tf.constant(float("nan"), tensor.dtype)
    else:
        hole = tensor
    return tf.identity(hole, name="sum")


def _has_gradient(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _check_context(caller: str, joined: JoinedTowers) -> None:
    if control_flow_context(joined.graph) is not joined.context:
        raise RuntimeError(
            f"{caller}: was called in a branch or loop of a tower, which other towers "
            "cannot reach; call it in the tower itself."
        )


def _is_around(outer: tf.Graph, graph: tf.Graph | None) -> bool:
    while graph is not None and graph is not outer:
        graph = getattr(graph, "outer_graph", None)
    return graph is outer


def _described(tensors: Sequence[tf.Tensor]) -> str:
    return ", ".join(f"{t.dtype.name} {t.shape}" for t in tensors)
