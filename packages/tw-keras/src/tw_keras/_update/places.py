"""Where an update is made, by the ``variables`` of a ``TowerModel``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_core import Tower
from tw_core.internal import apply_by_keras
from tw_core.ranks import RankGroup
from tw_keras._keras_compat import accumulators_of
from tw_keras._update.gradients import Rows


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a place needs to know of an update, beside gradients."""

    jit_compile: bool  # whether XLA compiles it
    weight: Any = None  # of the batch, over all, where the optimizer itself accumulates
    changes: Any = None  # whether variables change; None: they do


class Place:
    """The last stage of a row: where its optimizer updates.

    This one applies once, to variables that all towers share.
    """

    def __init__(self, optimizer: Any) -> None:
        """Takes the optimizer of ``compile``."""
        self._optimizer = optimizer

    @property
    def states(self) -> list[Any]:
        """[K] towers' optimizer state, the first the optimizer; or that alone."""
        return [self._optimizer]

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the optimizer's state for tower 0's variables, where it is used."""
        with tf.init_scope():
            if not self._optimizer.built:
                self._optimizer.build(list(variables))

    def make_equal(self) -> None:
        """Copies tower 0's state to the others, if they have any."""

    def of_rank_0(self, group: RankGroup) -> list[Any]:
        """Returns the state that all ranks share, to be rank 0's."""
        return list(self._optimizer.variables) if self._optimizer.built else []

    def targets(self, variables: Sequence[Any]) -> Rows:
        """Returns the [T][M] variables that are updated; None on other ranks."""
        return [variables]

    def accumulators(self, variables: Sequence[Any]) -> Rows:
        """Returns the optimizer's [T][M] accumulators of gradients."""
        return [accumulators_of(self._optimizer, variables)]

    def apply(self, rows: Rows, variables: Sequence[Any], terms: Terms) -> None:
        """Updates from [T][M] reduced gradients, or from [1][M] for all."""
        pairs = list(zip(rows[0], variables, strict=True))
        apply_by_keras(self._optimizer, pairs, jit_compile=terms.jit_compile)


class WithCopies(Place):
    """A place whose variables have a copy in every tower."""

    def __init__(
        self,
        optimizer: Any,
        towers: Sequence[Tower],
        of_towers: Callable[[Sequence[Any]], Sequence[Sequence[Any]]],
    ) -> None:
        """Takes tower 0's optimizer, and its variables' [K] counterparts."""
        super().__init__(optimizer)
        self._towers, self._of_towers = towers, of_towers
