"""Sums over towers that are built one after the other, in one graph.

If one trace serves all towers, it is cut here, and the total is computed between the
towers' calls. Otherwise tower 0 needs the total before tower 1 has been built. It
continues with an op whose input is a placeholder; once the last tower has added its
tensor, the sum of all replaces the placeholder. The result is a plain ``AddN``: towers
do not synchronise at run time, so nothing can hang. The gradient of a sum is the sum of
its gradients in all towers, and is joined in the same way, in any order in which towers
are differentiated.

TensorFlow's own loops close their back edges like this (``Operation._update_input``).
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import tensorflow as tf

from tw_core._checks import check_whole_number
from tw_core._modes import compiles_with_xla, without_autograph
from tw_core._records.origins import open_tower_scope, without_numbers
from tw_core._tf_compat import control_flow_context, set_input, with_gradient
from tw_core._tracing import Combine, Scope, Settle, call_once, meet
from tw_core.synchronized._cycles import check_order_of_effects

_T = TypeVar("_T")
SumRanks = Callable[[str, Sequence[tf.Tensor]], Sequence[tf.Tensor]]


class _Entered(threading.local):
    """The towers that this thread is building."""

    places: "tuple[Place, ...]" = ()  # the innermost last
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # per tower


_entered = _Entered()


@without_autograph
def sum_over_towers(tensors: _T) -> _T:
    """Sums tensors over all towers of a build, in the function that builds a tower.

    The n-th call in one tower is matched with the n-th call in every other. The
    gradient of a sum is the sum of its gradients in all towers: with respect to tower
    k's tensors, the gradients of tower k's loss are those of the sum of all towers'
    losses. Differentiate the losses of all towers in the same way.

    Args:
      tensors: a tensor, or a structure of tensors as of ``tf.nest``, of the same
        dtypes and shapes in all towers.

    Returns:
      The sums in the same structure, made on tower 0's device. Outside of towers, and
      with a single tower, ``tensors`` unchanged.

    Raises:
      ValueError: the layer, structure, dtypes or shapes differ from tower 0's; on
        leaving a tower, its sums differ from tower 0's.
      RuntimeError: in eager mode; in the body of a loop, or, where each tower is
        traced, of a ``tf.cond`` or a function that a tower builds; or in a tower that
        neither ``map_towers`` nor a builder builds.
    """
    place = current_place()
    if place is None or place.joined.total == 1:
        return tensors
    flat = [tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(tensors)]
    with tf.name_scope("sum_over_towers"):
        sums = place.joined.sum(place, flat)
    return cast(_T, tf.nest.pack_sequence_as(tensors, sums))


@contextmanager
def joined_towers(total: int) -> Iterator["JoinedTowers"]:
    """Joins the towers that are built inside, for ``sum_over_towers``.

    For code that builds towers without ``map_towers``: each in ``.tower(k)``, tower 0
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
    joined = JoinedTowers(check_whole_number(total=total, at_least=1))
    yield joined
    joined.close()


class Joined(Protocol):
    """The towers of a build: built one after the other, or traced once for all."""

    total: int
    graph: tf.Graph | None  # None in eager mode
    context: Any  # of control flow, where the towers are built

    def sum(self, place: "Place", tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Takes a tower's tensors; returns the totals, which can be differentiated."""

    def updates(self, variable: Any, place: "Place") -> bool:
        """Returns whether this tower updates a variable for all towers."""


class JoinedTowers:
    """The sums of one build of towers, made by ``joined_towers``."""

    def __init__(self, total: int) -> None:
        self.total = total
        eager = tf.executing_eagerly()
        self.graph = None if eager else tf.compat.v1.get_default_graph()
        self.context = None if self.graph is None else control_flow_context(self.graph)
        self._sums: list[_Sum] = []
        self._counts: Counter[int] = Counter()
        self._updated_by: dict[Any, int] = {}
        self._first_op = 0
        self.counted: Sequence[tf.Tensor] | None = None  # [K], whose parts are added

    @contextmanager
    def tower(self, index: int) -> Iterator[None]:
        """Marks tower ``index``, built inside; enter every index once, in order."""
        check_whole_number(index=index, at_least=0)
        if index >= self.total:
            raise ValueError(
                f"joined_towers: index must be below total={self.total}; got {index}."
            )
        scope = "" if self.graph is None else self.graph.get_name_scope()
        outer = _entered.places
        _entered.places = (*outer, Place(self, index, scope, index))
        try:
            with _entered.around():
                yield
        finally:
            _entered.places = outer
        self._check_reached(index)

    def sum(self, place: "Place", tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Adds to the sum that a tower has reached; the first tower begins it."""
        n = self._counts[place.index]
        self._counts[place.index] += 1
        name = place.name()
        if not self._sums and self.graph is not None:
            self._first_op = len(self.graph.get_operations())
        if n == len(self._sums):
            self._sums.append(_Sum(self, name, begun_by=place.index))
        reached = self._sums[n]
        reached.check_same(place.index, name, tensors, self._sums)
        return reached.join(place.index, tensors)

    def updates(self, variable: Any, place: "Place") -> bool:
        """Returns True for the first tower to ask: one updates a shared variable."""
        return self._updated_by.setdefault(variable.ref(), place.index) == place.index

    def close(self) -> None:
        """Checks that the order of effects allows the sums to be computed."""
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
                "sum_over_towers: every tower must reach the same sums; "
                f"tower{index} has not reached {missing} of tower0, and tower0 has "
                f"not reached {more} of tower{index}. Build the same layers in every "
                "tower, in the same order, and differentiate all in the same way."
            )


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
        return own.removesuffix("sum_over_towers").rstrip("/") or "(no name scope)"


@contextmanager
def around_towers(make: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enters ``make()`` in every tower that this thread builds inside."""
    outer, _entered.around = _entered.around, make
    try:
        yield
    finally:
        _entered.around = outer


def current_place() -> Place | None:
    """Returns the tower being built in this thread and graph; None outside towers."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    for place in reversed(_entered.places):
        if place.joined.total == 1:
            return place
        if place.joined.graph is None:
            raise RuntimeError(
                "Towers are built one after the other, and eager mode computes each at "
                "once; call map_towers inside a tf.function. A tf.function for each "
                "tower is not enough."
            )
        if graph is place.joined.graph:
            _check_context(place.joined)
            return place
        if _is_around(place.joined.graph, graph):
            if isinstance(place.joined, _TracedTowers):  # See ``tracing.meet``.
                return place
            raise RuntimeError(
                "A sum over towers is in the body of a tf.cond, a loop or a function "
                f"inside tower{place.index}, which other towers cannot reach; build it "
                "in the tower itself."
            )
    scope = open_tower_scope()
    if scope is not None and scope.total > 1 and not _entered.places:
        raise RuntimeError(
            f"tower{scope.index} is built by neither map_towers nor a builder, so the "
            "other towers are unknown; build all of them in "
            "tw_core.synchronized.joined_towers."
        )
    return None


@dataclass(eq=False)
class _Sum:
    """One sum: the towers' parts so far, and the totals that the towers get."""

    joined: JoinedTowers
    name: str  # of the layer, in the tower that began the sum
    begun_by: int
    parts: dict[int, list[tf.Tensor]] = field(default_factory=dict)  # by tower
    totals: list[tf.Tensor] = field(default_factory=list)
    gradients: "list[_Sum]" = field(default_factory=list)  # one per differentiation
    counts: Counter[int] = field(default_factory=Counter)  # differentiations by tower

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
        """Refuses tensors that do not match those of the tower that began the sum."""
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
            f"sum_over_towers: towers must reach the same sums in the same order; "
            f"tower{self.begun_by} has reached {self.name!r} ({_described(begun)}), "
            f"tower{index} {name!r} ({_described(tensors)}). Build the same layers in "
            "the same order in every tower."
        )

    def with_gradients(self) -> "Iterator[_Sum]":
        """Yields this sum, and those of its gradients of any order."""
        yield self
        for one in self.gradients:
            yield from one.with_gradients()

    def _is_another(self, name: str, sums: "list[_Sum]") -> bool:
        # Where each tower has its own copy of a model, layer numbers go on.
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
                set_input(total.op, 0, _total(column, self.joined.counted))

    def _differentiable(
        self, index: int, tensors: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        # Not the sums' own gradient, which would reach other towers through AddN.
        return _differentiable(
            self.totals,
            tensors,
            lambda *upstream: self._gradient(index, list(upstream)),
        )

    def _gradient(self, index: int, upstream: list[tf.Tensor]) -> list[tf.Tensor]:
        if tf.compat.v1.get_default_graph() is not self.joined.graph:
            raise RuntimeError(
                f"sum_over_towers: the gradient of {self.name!r} in tower{index} is "
                "taken in another graph, such as the body of a tf.cond, which other "
                "towers cannot reach; take it where the tower is built."
            )
        _check_context(self.joined)
        n = self.counts[index]
        self.counts[index] += 1
        if n == len(self.gradients):
            name = f"{self.name} (gradient)"
            self.gradients.append(_Sum(self.joined, name, begun_by=index))
        with tf.name_scope("sum_over_towers_gradient"):
            return self.gradients[n].join(index, upstream)


class _TracedTowers:
    """The sums of towers that are traced once."""

    def __init__(self, total: int, graph: tf.Graph, updated: list[Any]) -> None:
        self.total, self._updated = total, updated
        self.graph: tf.Graph | None = graph
        self.context = control_flow_context(graph)

    def sum(self, place: Place, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Cuts the trace at a sum."""
        return _TracedSum(place.name()).of(tensors)

    def updates(self, variable: Any, place: Place) -> bool:
        """Notes a variable that one tower, whose trace this is, updates for all."""
        self._updated.append(variable)
        return True


@dataclass(frozen=True)
class _TracedSum:
    """A sum where the trace of all towers is cut."""

    name: str

    def of(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Passes on the tower's part, and returns the totals."""
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
        totals = meet(self, tensors, answer=specs, is_same=True)
        return _differentiable(totals, tensors, self._gradient)

    def _gradient(self, *upstream: tf.Tensor) -> list[tf.Tensor]:
        with tf.name_scope("sum_over_towers_gradient"):
            return _TracedSum(f"{self.name} (gradient)").of(list(upstream))


@without_autograph
def call_towers_once(
    fn: Callable[..., _T],
    items: Sequence[Sequence[Any]],
    scopes: Sequence[Scope],
    *,
    combine: Combine | None = None,
    counted: Sequence[tf.Tensor] | None = None,
    written_once: Sequence[Any] = (),
    kept_equal: Sequence[Any] = (),
    settle: Settle | None = None,
    outside: str | None = None,
    inline: bool | None = None,
    jit_compile: bool = False,
    num_ranks: int = 1,
    sum_ranks: SumRanks | None = None,
) -> list[_T]:
    """As ``tw_core.internal.call_once``, for towers whose function may sum over them.

    Args:
      fn: the function of a tower.
      items: [K] lists of arguments.
      scopes: [K] functions that return the context of a tower's calls.
      combine: answers meetings that are not sums; None if there are none.
      counted: [K] booleans: whether sums include a tower's part, False for rows that
        are only padding; None for all.
      written_once: variables that several towers share and tower 0 alone assigns;
        moving averages of ``batch_normalization`` are added to them.
      kept_equal: as for ``call_once``.
      settle: as for ``call_once``.
      outside: as for ``call_once``.
      inline: whether calls are inlined; None to decide by their size.
      jit_compile: whether XLA compiles the function, part by part.
      num_ranks: number of processes whose towers are summed over, K in each.
      sum_ranks: takes the name of the layer that sums, and the [N] sums of this
        process's towers; returns those of all processes. For ``num_ranks`` above 1.

    Returns:
      The K results.

    Raises:
      RuntimeError: outside of ``tf.function``.
      ValueError: items that do not match, or as ``call_once``.
      TypeError: tensors of different dtypes.
    """
    total, written = len(items), list(written_once)
    of_all = total if sum_ranks is None else total * num_ranks

    def of_any_tower(number: tf.Tensor, *own: Any) -> _T:
        graph = tf.compat.v1.get_default_graph()
        joined = _TracedTowers(of_all, graph, written)
        outer = _entered.places
        _entered.places = (*outer, Place(joined, 0, graph.get_name_scope(), number))
        try:
            with _entered.around():
                return fn(*own)
        finally:
            _entered.places = outer

    def answer(place: Any, brought: list[Any]) -> Sequence[Any]:
        if isinstance(place, _TracedSum):
            sums = _add(brought, counted)
            return [sums if sum_ranks is None else sum_ranks(place.name, sums)] * total
        if combine is None:
            raise RuntimeError(f"Towers synchronise at {place}, without a combine.")
        return combine(place, brought)

    return call_once(
        of_any_tower,
        [[tf.constant(k), *own] for k, own in enumerate(items)],
        scopes,
        combine=answer,
        written_once=written,
        kept_equal=kept_equal,
        settle=settle,
        outside=outside,
        inline=inline,
        jit_compile=jit_compile,
        packs_results=combine is None,
    )


def _add(
    brought: Sequence[Sequence[tf.Tensor]], counted: Sequence[tf.Tensor] | None
) -> list[tf.Tensor]:
    with tf.name_scope("sum_over_towers"), tf.device(brought[0][0].device):
        return [_total(column, counted) for column in zip(*brought, strict=True)]


def _total(
    column: Sequence[tf.Tensor], counted: Sequence[tf.Tensor] | None
) -> tf.Tensor:
    """Adds the towers' parts that count; the others may be NaN."""
    if counted is not None:
        zeros = tf.zeros_like(column[0])
        pairs = zip(counted, column, strict=True)
        column = [tf.where(counts, own, zeros) for counts, own in pairs]
    return tf.add_n(list(column))


def _differentiable(
    totals: Sequence[tf.Tensor],
    tensors: Sequence[tf.Tensor],
    gradient: Callable[..., Sequence[Any]],
) -> list[tf.Tensor]:
    """Returns totals whose gradients flow back through a tower's own tensors."""
    sums = list(totals)
    chosen = [n for n, tensor in enumerate(tensors) if _has_gradient(tensor)]
    if chosen:
        passed = with_gradient(
            [sums[n] for n in chosen], [tensors[n] for n in chosen], gradient
        )
        for n, total in zip(chosen, passed, strict=True):
            sums[n] = total
    return sums


def _later(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor whose op's input is replaced later."""
    if not compiles_with_xla():
        name = "waits_for_all_towers"  # seen in the error if one never arrives
        hole = tf.compat.v1.placeholder(tensor.dtype, tensor.shape, name=name)
    elif _has_gradient(tensor):  # XLA compiles no placeholder, not even an unused one
        hole = tensor * tf.constant(float("nan"), tensor.dtype)
    else:
        hole = tensor
    return tf.identity(hole, name="sum")


def _has_gradient(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _check_context(joined: Joined) -> None:
    if control_flow_context(joined.graph) is not joined.context:
        raise RuntimeError(
            "A sum over towers is in a branch or loop of a tower, which other towers "
            "cannot reach; build it in the tower itself."
        )


def _is_around(outer: tf.Graph, graph: tf.Graph | None) -> bool:
    while graph is not None and graph is not outer:
        graph = getattr(graph, "outer_graph", None)
    return graph is outer


def _described(tensors: Sequence[tf.Tensor]) -> str:
    return ", ".join(f"{t.dtype.name} {t.shape}" for t in tensors)
