"""The builder for copies of the variables, each updated by one tower."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tw_builders._apply import one_optimizer_per_tower, reduce_onto
from tw_builders._owners import check_homes, owned
from tw_builders._session.base import CopiesBuilder
from tw_builders._sharded import apply_and_copy
from tw_core import Tower
from tw_core.internal import Gradients, check_flag


class SyncMultiGPUShardedBuilder(CopiesBuilder):
    """Every tower has all variables; one tower updates each, and the rest copy it.

    Attributes:
      grads: after ``build``, [N] pairs of a reduced gradient and its owner's variable.

    >>> import tensorflow as tf
    >>> v1 = tf.compat.v1
    >>> def tower():
    ...     w = v1.get_variable("w", initializer=tf.constant([4.0, 8.0]))
    ...     return [(tf.gradients(tf.reduce_sum(w**2), w)[0], w)]
    >>> with tf.Graph().as_default(), v1.Session() as session:
    ...     builder = SyncMultiGPUShardedBuilder(["/cpu:0"] * 2, average=True)
    ...     pairs = builder.call_for_each_tower(tower)
    ...     train_op, sync_op = builder.build(
    ...         pairs, lambda: v1.train.GradientDescentOptimizer(0.25)
    ...     )
    ...     _ = session.run(v1.global_variables_initializer())
    ...     _ = session.run(v1.local_variables_initializer())
    ...     _ = session.run(sync_op)
    ...     _ = session.run(train_op)
    ...     print(session.run(pairs[1][0][1]))
    [2. 4.]
    """

    def __init__(
        self,
        towers: Sequence[int | str | Tower],
        average: bool,
        *,
        flat_below_bytes: int = 0,
        flat_group: Callable[[str], Hashable | None] | None = None,
    ) -> None:
        """Takes the towers.

        Args:
          towers: ints (GPU numbers) and device strings, or the result of
            ``tw_core.towers``.
          average: whether owners apply the mean of the gradients, or their sum.
          flat_below_bytes: as for ``DataParallelBuilder``; a flat variable has one
            owner.
          flat_group: as for ``DataParallelBuilder``.

        Raises:
          ValueError: as ``DataParallelBuilder``.
          TypeError: an ``average`` that is not a bool.
        """
        super().__init__(
            towers, flat_below_bytes=flat_below_bytes, flat_group=flat_group
        )
        check_flag(average=average)
        self._average = average
        self.grads: list[tuple[Any, tf.Variable]] | Any = None

    def _train_op(
        self,
        packed: Gradients,
        get_opt_fn: Callable[[], Any],
        weights: Sequence[Any] | None,
    ) -> Any:
        variables = packed.variables
        check_homes(self._towers, variables)
        [optimizer] = one_optimizer_per_tower(self._towers[:1], get_opt_fn)
        self.grads = reduce_onto(
            owned(variables), packed, average=self._average, weights=weights
        )
        return apply_and_copy(self._towers[0], self.grads, variables, optimizer)
