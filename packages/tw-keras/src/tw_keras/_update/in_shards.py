"""Placement of an update whose state is in shards over the ranks."""

from collections.abc import Callable, Sequence
from typing import Any

from tw_builders.internal import RankShards, shared_state
from tw_core.ranks import RankGroup
from tw_keras._keras_compat import accumulators_of, trained_by
from tw_keras._update.gradients import Rows
from tw_keras._update.places import Place, Terms


class InShards(Place):
    """Each rank updates its shards, and sends the new values to all."""

    def __init__(
        self, number: int, optimizer: Any, make: Callable[[Sequence[Any]], RankShards]
    ) -> None:
        """Takes the optimizer's number, and a function that makes its shards."""
        super().__init__(optimizer)
        self._number, self._make = number, make

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the state of this rank's shards."""
        self.shards = self._make(variables)

    def of_rank_0(self, group: RankGroup) -> list[Any]:
        """Returns counts, rates and scales."""
        return shared_state(self._optimizer) if self._optimizer.built else []

    def targets(self, variables: Sequence[Any]) -> Rows:
        """Returns this rank's [1][S] shards, None for those of other variables."""
        return [self._of(variables, self.shards.variables)]

    def accumulators(self, variables: Sequence[Any]) -> Rows:
        """Returns the [1][S] accumulators of this rank's shards."""
        slots = accumulators_of(self._optimizer, trained_by(self._optimizer))
        return [self._of(variables, slots)]

    def _of(self, variables: Sequence[Any], own: Sequence[Any]) -> list[Any]:
        places = set(self.places(variables))
        pairs = zip(self.shards.own, own, strict=False)  # The last one is idle.
        return [it if shard.variable in places else None for shard, it in pairs]

    def places(self, variables: Sequence[Any]) -> list[int]:
        """Returns the places of some variables among all."""
        return [self.shards.place_of(own) for own in variables]

    def whole(self, variables: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
        """Returns gradients of all variables, None for those without one."""
        every: list[Any] = [None] * len(self.shards.shapes)
        for n, grad in zip(self.places(variables), grads, strict=True):
            every[n] = grad
        return every

    def cut(self, variables: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
        """Returns the parts of sums over all ranks that this rank applies."""
        return self.shards.divided(self.shards.cut(self.whole(variables, grads)))

    def apply(self, rows: Rows, variables: Sequence[Any], terms: Terms) -> None:
        """Updates shards with [1][S] gradients, and sends the values of variables."""
        self.shards.update(
            rows[0],
            self.places(variables),
            name=f"update {self._number}",
            jit_compile=terms.jit_compile,
            changes=terms.changes,
        )
