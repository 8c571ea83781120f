"""Reducers that move tensors before and after another reducer, which adds them.

What only joins, cuts or copies commutes with multiplying by 1/K; so ``mean``
may multiply inside, where there are fewer tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tw_core import without_autograph
from tw_reduce._tower_tensors import Reducer, Tensorlike, TowerTensors


@dataclass(frozen=True)
class Around:
    """A reducer around another.

    Attributes:
      inner: adds.
      move: takes ``inner`` and [K][N] gradients, and returns what ``inner``
        made of them, moved back; it changes no value.
    """

    inner: Reducer
    move: Callable[[Reducer, TowerTensors], list[list[Tensorlike]]]

    @without_autograph
    def __call__(self, grads: TowerTensors) -> list[list[Tensorlike]]:
        """Reduces [K][N] gradients."""
        return self.move(self.inner, grads)
