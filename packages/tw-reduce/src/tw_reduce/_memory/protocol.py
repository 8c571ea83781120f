"""The interfaces of reducers with memory, and of compressors."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from tw_reduce._checks import check_reducer
from tw_reduce._reducer import Reducer, Tensorlike, is_stateful

States: TypeAlias = Sequence[Sequence[Any]]
"""[K][N]: tower k's memory of variable n, a nest of tensors; () for none."""

Compressor: TypeAlias = Callable[
    ..., tuple[Sequence[Tensorlike], Callable[..., tf.Tensor]]
]
"""Compresses a tensor, and returns the function that decodes it, or a sum.

Takes a dense floating tensor of known shape, and with ``draws`` a seed. Returns a list
of tensors and ``tf.IndexedSlices`` to send, and a function of as many arguments that
returns a tensor of the same shape and dtype: for the list itself, the approximation of
the tensor; for sums of several towers' lists by ``add``, the sum of their
approximations.
"""


class StatefulReducer(Protocol):
    """A reducer with memory, which does not hold the memory itself.

    Its methods have no side effects. Its caller keeps the state, one per tower
    and variable, and replaces it where the update is made (``ReducerState``).
    """

    def init(self, variables: Sequence[Any]) -> Sequence[Any]:
        """Returns a tower's memory before its first step.

        Args:
          variables: [N] the tower's variables; it is called once per tower, on the
            tower's device.

        Returns:
          [N] nests of tensors, such as ``{"error": tf.zeros(...)}``; () for a variable
          without memory. Equal in all towers.
        """

    def update(
        self, grads: Sequence[Sequence[tf.Tensor]], states: States, add: Reducer
    ) -> tuple[Sequence[Sequence[tf.Tensor]], States]:
        """Reduces gradients.

        Args:
          grads: [K][M] dense gradients after unscaling, in their variables' shapes, in
            the order of ``init``: those of variables that have one in this step. For a
            mean, each tower's share of it, so that sums are the mean.
          states: [K][M] the towers' memory of these variables.
          add: [K][L] -> [K][L], adds tensors of any shapes, and ``tf.IndexedSlices``,
            whose rows it keeps, those of tower 0 first; over all towers, those of
            other processes included. Every tower gets the same bits. If ranks exchange
            parts, it has their ``group``, and ``all_to_all`` and ``all_gather`` of
            matrices with a row for each of them.

        Returns:
          [K][M] sums, equal in all towers, and [K][M] new states, nested as the old.
        """


def check_stateful(**argument: Any) -> StatefulReducer:
    """Refuses anything without ``init`` and ``update``."""
    ((name, reducer),) = argument.items()
    if not is_stateful(reducer):
        if callable(reducer):
            check_reducer(**argument)
        raise TypeError(
            f"{name} must have init(variables) and update(grads, states, add), as "
            f"tw_reduce.compression.power_sgd() has; got {reducer!r:.80}."
        )
    return reducer  # type: ignore[no-any-return]
