"""Sums over towers, and joined rows, of towers built one after the other in one graph.

If one trace serves all towers, it is cut here, and the total is computed between the
towers' calls. Otherwise tower 0 needs the total before tower 1 has been built. It
continues with an op whose input is a placeholder; once the last tower has added its
tensor, the sum of all replaces the placeholder. The result is a plain ``AddN``: towers
do not synchronise at run time, so nothing can hang. The gradient of a sum is the sum of
its gradients in all towers, and is joined in the same way, in any order in which towers
are differentiated.

TensorFlow's own loops close their back edges like this (``Operation._update_input``).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tw_core._checks import check_whole_number
from tw_core._modes import compiles_with_xla
from tw_core._records.origins import without_numbers
from tw_core._tf_compat import control_flow_context, set_input
from tw_core.synchronized._cycles import check_order_of_effects
from tw_core.synchronized._parts import (
    CombineParts,
    add_parts,
    differentiable,
    has_gradient,
    join_parts,
    own_rows,
    sizes_of,
)
from tw_core.synchronized._places import Place, check_context, inside


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


class JoinedTowers:
    """The sums of one build of towers, made by ``joined_towers``."""

    says = (
        "Towers are built one after the other, and eager mode computes each at once; "
        "call map_towers inside a tf.function. A tf.function for each tower is not "
        "enough."
    )
    reached = None

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
        """Marks tower ``index``, built inside; enter every index once, in order."""
        check_whole_number(index=index, at_least=0)
        if index >= self.total:
            raise ValueError(
                f"joined_towers: index must be below total={self.total}; got {index}."
            )
        scope = "" if self.graph is None else self.graph.get_name_scope()
        with inside(Place(self, index, scope, index)):
            yield
        self._check_reached(index)

    def sum(self, place: Place, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Adds to the sum that a tower has reached; the first tower begins it."""
        return self._reach(place, tensors, add_parts)

    def gather(self, place: Place, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Adds rows to those of the towers before."""
        return self._reach(place, tensors, join_parts)

    def _reach(
        self, place: Place, tensors: list[tf.Tensor], combine: CombineParts
    ) -> list[tf.Tensor]:
        n = self._counts[place.index]
        self._counts[place.index] += 1
        name = place.name()
        if not self._sums and self.graph is not None:
            self._first_op = len(self.graph.get_operations())
        if n == len(self._sums):
            self._sums.append(_Sum(self, name, place.index, combine))
        reached = self._sums[n]
        reached.check_same(place.index, name, tensors, self._sums, combine)
        return reached.join(place.index, tensors)

    def updates(self, variable: Any, place: Place) -> bool:
        """Returns True for the first tower to ask: one updates a shared variable."""
        return self._updated_by.setdefault(variable.ref(), place.index) == place.index

    def close(self) -> None:
        """Checks that the order of effects allows the sums to be computed."""
        if self._sums and self.graph is not None:
            check_order_of_effects(self.graph.get_operations()[self._first_op :])

    def _check_reached(self, index: int) -> None:
        every = [one for reached in self._sums for one in reached.with_gradients()]
        missing = [one for one in every if 0 in one.parts and index not in one.parts]
        more = [one for one in every if 0 not in one.parts and index in one.parts]
        if missing or more:
            raise ValueError(
                f"{[*missing, *more][0].says()}: every tower must reach the same sums; "
                f"tower{index} has not reached {[one.name for one in missing]} of "
                f"tower0, and tower0 has not reached {[one.name for one in more]} of "
                f"tower{index}. Build the same layers in every tower, in the same "
                "order, and differentiate all in the same way."
            )


@dataclass(eq=False)
class _Sum:
    """One sum: the towers' parts so far, and the totals that the towers get."""

    joined: JoinedTowers
    name: str  # of the layer, in the tower that began the sum
    begun_by: int
    combine: CombineParts  # adds the parts, or joins their rows
    parts: dict[int, list[tf.Tensor]] = field(default_factory=dict)  # by tower
    totals: list[tf.Tensor] = field(default_factory=list)
    gradients: "list[_Sum]" = field(default_factory=list)  # one per differentiation
    counts: Counter[int] = field(default_factory=Counter)  # differentiations by tower

    def join(self, index: int, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Adds a tower's part, and returns the totals, which can be differentiated."""
        if not self.parts:
            self.totals = [_later(tensor, self._shape(tensor)) for tensor in tensors]
        self.parts[index] = tensors
        if len(self.parts) == self.joined.total:
            self._close()
        # Not the sums' own gradient, which would reach other towers through AddN.
        return differentiable(
            self.totals, tensors, lambda *upstream: self._gradient(index, upstream)
        )

    def check_same(
        self,
        index: int,
        name: str,
        tensors: Sequence[tf.Tensor],
        sums: "list[_Sum]",
        combine: CombineParts,
    ) -> None:
        """Refuses tensors that do not match those of the tower that began the sum."""
        if not self.parts:
            return
        begun = self.parts[self.begun_by]
        fit = len(begun) == len(tensors) and combine is self.combine
        fit = fit and all(
            own.dtype == other.dtype
            and self._shape(own).is_compatible_with(self._shape(other))
            for own, other in zip(begun, tensors, strict=True)
        )
        if fit and not self._is_another(name, sums):
            return
        raise ValueError(
            f"{self.says()}: towers must reach the same sums in the same order; "
            f"tower{self.begun_by} has reached {self.name!r} ({_described(begun)}), "
            f"tower{index} {name!r} ({_described(tensors)}). Build the same layers in "
            "the same order in every tower."
        )

    def says(self) -> str:
        """Returns the function that errors name."""
        return "sum_over_towers" if self.combine is add_parts else "gather"

    def with_gradients(self) -> "Iterator[_Sum]":
        """Yields this sum, and those of its gradients of any order."""
        yield self
        for one in self.gradients:
            yield from one.with_gradients()

    def _shape(self, tensor: tf.Tensor) -> tf.TensorShape:
        """Returns what is known of the total's shape."""
        if self.combine is add_parts:
            return tensor.shape
        return tf.TensorShape([None, *tensor.shape[1:]])

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
                set_input(total.op, 0, self.combine(column))

    def _gradient(self, index: int, upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if tf.compat.v1.get_default_graph() is not self.joined.graph:
            raise RuntimeError(
                f"{self.says()}: the gradient of {self.name!r} in tower{index} is "
                "taken in another graph, such as the body of a tf.cond, which other "
                "towers cannot reach; take it where the tower is built."
            )
        check_context(self.joined)
        n = self.counts[index]
        self.counts[index] += 1
        if n == len(self.gradients):
            name = f"{self.name} (gradient)"
            self.gradients.append(_Sum(self.joined, name, index, add_parts))
        with tf.name_scope("sum_over_towers_gradient"):
            sums = self.gradients[n].join(
                index, list(map(tf.convert_to_tensor, upstream))
            )
            if self.combine is add_parts:
                return sums
            columns = [
                [self.parts[k][m] for k in range(index + 1)]
                for m, tensor in enumerate(self.parts[index])
                if has_gradient(tensor)
            ]
            rows = []
            for total, (*before, own) in zip(sums, columns, strict=True):
                first = sum(sizes_of(before), tf.constant(0))
                rows.append(own_rows(total, own, first))
            return rows


def _later(tensor: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Returns a tensor whose op's input is replaced later."""
    if not compiles_with_xla():
        name = "waits_for_all_towers"  # seen in the error if one never arrives
        hole = tf.compat.v1.placeholder(tensor.dtype, shape, name=name)
    elif tensor.shape != shape:
        hole = tf.compat.v1.placeholder_with_default(tensor, shape)
    elif has_gradient(tensor):  # XLA compiles no placeholder, not even an unused one
        hole = tensor * tf.constant(float("nan"), tensor.dtype)
    else:
        hole = tensor
    return tf.identity(hole, name="sum")


def _described(tensors: Sequence[tf.Tensor]) -> str:
    return ", ".join(f"{t.dtype.name} {t.shape}" for t in tensors)
