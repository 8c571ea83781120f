"""Reducers made of others, in a form that shows ``mean`` what is inside.

What only joins, cuts, copies or rounds beforehand commutes with multiplying by
1/K afterwards; so ``mean`` may multiply inside, where there are fewer tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tw_core import without_autograph
from tw_reduce._reducer import Reducer, Tensorlike, TowerTensors


@dataclass(frozen=True, eq=False)
class Around:
    """A reducer around another.

    Attributes:
      inner: adds.
      move: takes ``inner`` and [K][N] gradients, and returns what ``inner``
        made of them, moved back; it changes no value after ``inner``.
    """

    inner: Reducer
    move: Callable[[Reducer, TowerTensors], list[list[Tensorlike]]]

    @without_autograph
    def __call__(self, grads: TowerTensors) -> list[list[Tensorlike]]:
        """Reduces [K][N] gradients."""
        return self.move(self.inner, grads)


@dataclass(frozen=True, eq=False)
class Dealt:
    """A reducer that deals the gradients out to others.

    Attributes:
      reducers: by name; they add.
      deal: takes ``reducers`` and [K][N] gradients, and returns what they made
        of them, in the gradients' order; it changes no value.
    """

    reducers: Mapping[str, Reducer]
    deal: Callable[[Mapping[str, Reducer], TowerTensors], list[list[Tensorlike]]]

    @without_autograph
    def __call__(self, grads: TowerTensors) -> list[list[Tensorlike]]:
        """Reduces [K][N] gradients."""
        return self.deal(self.reducers, grads)
