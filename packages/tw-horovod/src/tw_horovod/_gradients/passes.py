"""Several passes per step: each rank adds up its gradients, and reduces the sums once.

    pass 1      sum += gradients; count = 1       the step counts, nothing is applied
    pass 2      sum += gradients; count = 2 of 2  reduced, applied; sum = 0, count = 0

Sums and the count are variables that neither Keras nor savers save.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core.internal import add_to_sums, clear_sums, make_sums, map_values
from tw_horovod._gradients.reducer import GradientReducer, check_dense
from tw_horovod._operations.exchanges import scaled

# int64, as int32 variables stay on the host, where XLA finds none.
_COUNT = tf.TensorSpec([], tf.int64)


class Passes:
    """The sums of one optimizer's gradients since they were last reduced."""

    def __init__(self, reducer: GradientReducer) -> None:
        """Starts at pass 0, without variables."""
        self._reducer = reducer
        self.local: dict[int, Any] = {}  # Variables whose gradients a rank keeps.
        self.reduced: dict[Any, Any] = {}  # Where each was, by its reference.
        self._count: list[tf.Variable] = []
        self._sums: dict[int, tf.Variable] = {}  # By the variable's id.

    def are_reduced(self) -> tf.Tensor:
        """Returns whether the last pass was that of a step's end."""
        return tf.equal(self._count[0].read_value(), 0)

    def add(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        *,
        finish: Callable[[list[Any]], Any],
        wait: Callable[[Callable[[], list[Any]]], Any],
    ) -> Any:
        """Adds gradients; returns ``finish(reduced)``, or before that ``wait(read)``.

        Both return tensors of the same structure; ``read()`` returns the sums. Takes
        and gives [N] gradients, None where there is none. Serves sessions and
        functions: what is returned depends on all effects.
        """
        dense = self._reducer.densify(grads)
        places = [n for n, grad in enumerate(dense) if grad is not None]
        own = [dense[n] for n in places]
        check_dense(dense)
        sums = self._sums_of(own, [variables[n] for n in places])
        counts = self._count

        def read() -> list[Any]:
            known = dict(zip(places, sums, strict=True))
            return [
                known[n].read_value() if n in known else None for n in range(len(dense))
            ]

        def reduce() -> Any:
            reduced = self._reducer.reduce(read(), variables, self.local)
            share = partial(scaled, factor=self._reducer.share)
            done = finish([g if g is None else map_values(share, g) for g in reduced])
            with _after(tf.nest.flatten(done)):
                cleared = clear_sums([*counts, *sums])
            with _after(cleared):
                return tf.nest.map_structure(tf.identity, done)

        one = tf.ones([], tf.int64)
        with _after(add_to_sums([*counts, *sums], [one, *own])):
            is_last = tf.equal(counts[0].read_value(), self._reducer.passes)
        return tf.cond(is_last, reduce, lambda: wait(read))

    def _sums_of(
        self, grads: Sequence[tf.Tensor], variables: Sequence[Any]
    ) -> list[tf.Variable]:
        """Returns the variables' sums; makes those that do not exist yet."""
        if not self._count:
            self._count = make_sums([_COUNT], name="horovod_passes")
        for grad, variable in zip(grads, variables, strict=True):
            if id(variable) not in self._sums:
                spec = tf.TensorSpec(variable.shape, grad.dtype)
                [self._sums[id(variable)]] = make_sums([spec])
        return [self._sums[id(variable)] for variable in variables]


def _after(done: Sequence[Any]) -> Any:
    """Orders effects after others; eagerly there is nothing to order."""
    return tf.control_dependencies([own for own in done if own is not None])
