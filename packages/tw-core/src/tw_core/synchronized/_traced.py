"""Sums, and joined rows, of towers that are traced once: there the trace is cut."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow as tf

from tw_core._modes import without_autograph
from tw_core._tf_compat import control_flow_context
from tw_core._tracing import Combine, Scope, Settle, call_once, meet
from tw_core.synchronized._parts import (
    add_parts,
    differentiable,
    has_gradient,
    join_parts,
    own_rows,
    sizes_of,
)
from tw_core.synchronized._places import Place, inside

_T = TypeVar("_T")
SumRanks = Callable[[str, Sequence[Any]], Sequence[Any]]


class TracedTowers:
    """The sums of towers that are traced once."""

    says = ""

    def __init__(self, total: int, graph: tf.Graph, updated: list[Any]) -> None:
        self.total, self._updated = total, updated
        self.graph: tf.Graph | None = graph
        self.context = control_flow_context(graph)
        self.reached: list[str] = []

    def sum(self, place: Place, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Cuts the trace at a sum."""
        self.reached.append(place.name())
        return _TracedSum(place.name()).of(tensors)

    def gather(self, place: Place, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Cuts the trace where rows are joined."""
        self.reached.append(place.name())
        return _TracedRows(place.name(), place.number, self.total).of(tensors)

    def updates(self, variable: Any, place: Place) -> bool:
        """Notes a variable that one tower, whose trace this is, updates for all."""
        self._updated.append(variable)
        return True


@dataclass(frozen=True)
class _TracedSum:
    """A sum where the trace of all towers is cut."""

    name: str
    is_of_rows: bool = False  # of as many rows as there are in all towers

    def of(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Passes on the tower's part, and returns the totals."""
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
        totals = meet(self, tensors, answer=specs, is_same=True)
        return differentiable(totals, tensors, self._gradient)

    def _gradient(self, *upstream: tf.Tensor) -> list[tf.Tensor]:
        with tf.name_scope("sum_over_towers_gradient"):
            name = f"{self.name} (gradient)"
            return _TracedSum(name, self.is_of_rows).of(list(upstream))

    def combine(self, parts: Any, counted: Any, others: "_Others") -> list[Any]:
        """Returns the [N] totals of all towers, from [K] towers' parts."""
        with tf.name_scope("sum_over_towers"), tf.device(parts[0][0].device):
            columns = zip(*parts, strict=True)
            sums: list[Any] = [add_parts(column, counted) for column in columns]
            if others.sum is None:
                return sums
            if not self.is_of_rows:
                return list(others.sum(self.name, sums))
            # Ranks without a batch do not know how many rows there are.
            rows = [tf.IndexedSlices(own, tf.range(tf.shape(own)[0])) for own in sums]
            wide = zip(others.sum(self.name, rows), rows, strict=True)
            return [
                tf.math.unsorted_segment_sum(w.values, w.indices, tf.size(own.indices))
                for w, own in wide
            ]


@dataclass(frozen=True, eq=False)
class _TracedRows:
    """Rows that are joined where the trace of all towers is cut."""

    name: str
    number: Any  # the tower's, over all ranks
    total: int

    def of(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Passes on the tower's rows, and returns those of all."""
        specs = [tf.TensorSpec([None, *own.shape[1:]], own.dtype) for own in tensors]
        sizes = [tf.TensorSpec([self.total], tf.int32) for _ in tensors]
        joined, sizes = meet(self, tensors, answer=(specs, sizes), is_same=True)
        chosen = [n for n, own in enumerate(tensors) if has_gradient(own)]

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            with tf.name_scope("gather_gradient"):
                whole = _TracedSum(f"{self.name} (gradient)", is_of_rows=True)
                sums = whole.of([tf.convert_to_tensor(one) for one in upstream])
                return [
                    own_rows(total, tensors[n], tf.reduce_sum(sizes[n][: self.number]))
                    for total, n in zip(sums, chosen, strict=True)
                ]

        return differentiable(joined, tensors, gradient)

    def combine(self, parts: Any, counted: Any, others: "_Others") -> Any:
        """Returns [N] rows of all towers, and [N] numbers of rows, each by tower."""
        columns = list(zip(*parts, strict=True))
        with tf.name_scope("gather"), tf.device(parts[0][0].device):
            rows: list[Any] = [join_parts(column, counted) for column in columns]
            sizes = [tf.stack(sizes_of(column, counted)) for column in columns]
            if others.sum is None:
                return rows, sizes
            towers = tf.range(others.first, others.first + len(parts))
            pairs = zip(rows, sizes, strict=True)
            rows = [tf.IndexedSlices(own, tf.repeat(towers, of)) for own, of in pairs]
            wide = others.sum(self.name, rows)
            by_tower = [tf.argsort(own.indices, stable=True) for own in wide]
            pairs = zip(wide, by_tower, strict=True)
            return [tf.gather(own.values, order) for own, order in pairs], [
                tf.math.bincount(tf.cast(own.indices, tf.int32), minlength=self.total)
                for own in wide
            ]


@dataclass(frozen=True)
class _Others:
    """The towers of other processes."""

    first: int  # this process's first tower, among all
    sum: SumRanks | None


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
    rank: int = 0,
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
      rank: which of the processes this is, from 0.
      num_ranks: number of processes whose towers are summed over, K in each.
      sum_ranks: takes the name of the layer that sums, and the [N] sums of this
        process's towers; returns those of all processes. Where rows are joined, the
        sums are sparse. For ``num_ranks`` above 1.

    Returns:
      The K results.

    Raises:
      RuntimeError: outside of ``tf.function``.
      ValueError: items that do not match, or as ``call_once``.
      TypeError: tensors of different dtypes.
    """
    total, written = len(items), list(written_once)
    of_all = total if sum_ranks is None else total * num_ranks
    others = _Others(rank * total, sum_ranks)

    def of_any_tower(number: tf.Tensor, *own: Any) -> _T:
        graph = tf.compat.v1.get_default_graph()
        joined = TracedTowers(of_all, graph, written)
        with inside(Place(joined, 0, graph.get_name_scope(), number)):
            return fn(*own)

    def answer(place: Any, parts: list[Any]) -> Sequence[Any]:
        if isinstance(place, _TracedSum | _TracedRows):
            return [place.combine(parts, counted, others)] * total
        if combine is None:
            raise RuntimeError(f"Towers synchronise at {place}, without a combine.")
        return combine(place, parts)

    return call_once(
        of_any_tower,
        [[tf.constant(k), *own] for k, own in enumerate(items, rank * total)],
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
