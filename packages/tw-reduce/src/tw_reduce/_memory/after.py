"""A warm-up: gradients are sent whole at first, while they change fastest.

Source: ``start_powerSGD_iter`` of PyTorch's communication hooks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tw_core.internal import check_whole_number
from tw_reduce._memory.carried import Carried
from tw_reduce._memory.protocol import StatefulReducer, States, check_stateful
from tw_reduce._reducer import Reducer

_Result = tuple[Sequence[Sequence[tf.Tensor]], States]


def after(steps: int, reducer: StatefulReducer) -> StatefulReducer:
    """Makes a reducer that sends whole gradients first, and then as another does.

    Only updates that are made count, as memory changes with them alone. A restored
    memory goes on counting.

    Args:
      steps: the number of updates with whole gradients; 0 or more.
      reducer: one with memory, for the updates after these.

    Returns:
      A reducer with memory: that of ``reducer``, and a number for each variable that
      has some. Sums of both kinds are in one graph, in branches of which one runs.

    Raises:
      TypeError: ``steps`` is not a whole number, or ``reducer`` has no memory.
      ValueError: ``steps`` is negative.
    """
    check_whole_number(steps=steps, at_least=0)
    return _After(steps, check_stateful(reducer=reducer))


class _After:
    """A reducer with memory that another one, inside, has from some update on."""

    def __init__(self, steps: int, reducer: StatefulReducer) -> None:
        self._steps, self._reducer = steps, reducer
        if hasattr(reducer, "resize"):  # Without it, memory starts from zero.
            self.resize = self._resize

    def init(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the other reducer's memory, with the number of updates."""
        memory = self._reducer.init(variables)
        count = tf.zeros([], tf.int64)
        return [
            {"memory": own, "updates": count} if tf.nest.flatten(own) else ()
            for own in memory
        ]

    def update(
        self, grads: Sequence[Sequence[tf.Tensor]], states: States, add: Reducer
    ) -> _Result:
        """Sends gradients whole, or as the other reducer does."""
        memory = [[own and own["memory"] for own in tower] for tower in states]
        counts = [own["updates"] for own in states[0] if own]
        if not counts:
            return self._reducer.update(grads, memory, add)
        whole = add.apart() if isinstance(add, Carried) else add
        # Of variables that are trained later, none is sent whole for that.
        sums, new = _either(
            tf.reduce_max(tf.stack(counts)) < self._steps,
            lambda: (whole(grads), memory),
            lambda: self._reducer.update(grads, memory, add),
            like=(grads, memory),
        )
        return sums, [
            [
                old and {"memory": own, "updates": old["updates"] + 1}
                for own, old in zip(*of_tower, strict=True)
            ]
            for of_tower in zip(new, states, strict=True)
        ]

    def _resize(self, states: Sequence[Any], count: int) -> list[Any]:
        """Divides the other reducer's memory among ``count`` towers."""
        inner: Any = self._reducer
        memory = inner.resize([own["memory"] for own in states], count)
        return [{**states[0], "memory": own} for own in memory]


def _either(
    condition: tf.Tensor,
    first: Callable[[], _Result],
    second: Callable[[], _Result],
    *,
    like: _Result,
) -> Any:
    """Returns the result of one of two branches, nested as ``like``."""
    found = tf.cond(
        condition, lambda: tf.nest.flatten(first()), lambda: tf.nest.flatten(second())
    )
    return tf.nest.pack_sequence_as(like, tf.nest.flatten(found))
