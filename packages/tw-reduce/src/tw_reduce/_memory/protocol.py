"""What a reducer with memory is, and what it takes to be one."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from tw_reduce._reducer import Reducer, Tensorlike, is_stateful

States: TypeAlias = Sequence[Sequence[Any]]
"""[K][N]: what tower k remembers of variable n, a nest of tensors; () for nothing."""

Compressor: TypeAlias = Callable[
    [tf.Tensor], tuple[Sequence[Tensorlike], Callable[..., tf.Tensor]]
]
"""Makes what travels of a tensor, and the function that reads it, or a sum of it.

Takes a dense floating tensor of known shape. Returns a list of tensors and
``tf.IndexedSlices``, and a function of as many that returns a tensor of the same shape
and dtype: of what travels itself, the approximation of the tensor; of what ``add`` made
of several towers', the sum of their approximations.
"""


class StatefulReducer(Protocol):
    """A reducer with memory, which holds none itself.

    Its functions change nothing. Its caller keeps the state, one per tower
    and variable, and replaces it where the update is made (``ReducerState``).
    """

    def init(self, variables: Sequence[Any]) -> Sequence[Any]:
        """Returns what a tower remembers before its first step.

        Args:
          variables: [N] the tower's variables; it is called once per tower, on the
            tower's device.

        Returns:
          [N] nests of tensors, such as ``{"error": tf.zeros(...)}``; () for a variable
          of which nothing is remembered. Equal in all towers, but for zeros.
        """

    def update(
        self, grads: Sequence[Sequence[tf.Tensor]], states: States, add: Reducer
    ) -> tuple[Sequence[Sequence[tf.Tensor]], States]:
        """Reduces gradients.

        Args:
          grads: [K][M] dense gradients after unscaling, in their variables' shapes, of
            variables in the order of ``init``: those that have one in this step. For a
            mean, each tower's share of it, so that sums are the mean.
          states: [K][M] what the towers remember of these.
          add: [K][L] -> [K][L], adds tensors of any shapes, and ``tf.IndexedSlices``,
            whose rows it keeps, those of tower 0 first; over all towers, and over
            other processes' if there are any. Every tower gets the same bits.

        Returns:
          [K][M] sums, equal in all towers, and [K][M] new states in the old nests.
        """


def check_stateful(**argument: Any) -> StatefulReducer:
    """Refuses anything without ``init`` and ``update``."""
    ((name, reducer),) = argument.items()
    if not is_stateful(reducer):
        raise TypeError(
            f"{name} must have init(variables) and update(grads, states, add), as "
            f"tw_reduce.compression.power_sgd() has; got {reducer!r:.80}."
        )
    return reducer  # type: ignore[no-any-return]
