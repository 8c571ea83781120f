"""Synchronous training with a copy of the variables on every device."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import tensorflow as tf

from tw_builders._apply import (
    apply_to_replicas,
    one_optimizer_per_tower,
)
from tw_builders._session.base import CopiesBuilder
from tw_builders._session.sync_variables import build_sync_op
from tw_core import Tower
from tw_core.gradients import check_replicated_grad_list, merge_grad_list
from tw_core.internal import Gradients, check_flag
from tw_reduce import Reducer, StatefulReducer, all_reduce, mean, reducer_for_mode
from tw_reduce.internal import check_reducer, is_stateful, with_memory
from tw_reduce.reducers import check_adds


class SyncMultiGPUReplicatedBuilder(CopiesBuilder):
    """Every tower has its own variables, and applies the same reduced gradients.

    Attributes:
      grads: after ``build``, [K][N] (reduced gradient, variable) pairs; a flat variable
        stands for those packed into it.

    >>> import tensorflow as tf
    >>> v1 = tf.compat.v1
    >>> def tower():
    ...     w = v1.get_variable("w", initializer=tf.constant([4.0, 8.0]))
    ...     return [(tf.gradients(tf.reduce_sum(w**2), w)[0], w)]
    >>> with tf.Graph().as_default(), v1.Session() as session:
    ...     builder = SyncMultiGPUReplicatedBuilder(["/cpu:0"] * 2)
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
        average: bool = True,
        mode: Literal["collective", "cpu", "gpu", "hierarchical", "nccl"]
        | Reducer
        | StatefulReducer
        | None = None,
        *,
        flat_below_bytes: int = 0,
        flat_group: Callable[[str], Hashable | None] | None = None,
    ) -> None:
        """Chooses the reduction.

        Args:
          towers: ints (GPU numbers) and device strings, or the result of
            ``tw_core.towers``.
          average: whether towers apply the mean of the gradients, or their sum.
          mode: a reducer of ``tw_reduce`` that adds (with ``average`` this class
            divides), or one of the older names ``"cpu"``, ``"gpu"``,
            ``"nccl"``, ``"hierarchical"``, ``"collective"``; None for
            ``tw_reduce.all_reduce``. A reducer's memory is in global
            variables, which savers save.
          flat_below_bytes: as for ``DataParallelBuilder``.
          flat_group: as for ``DataParallelBuilder``.

        Raises:
          ValueError: an unknown mode, one that does not fit the towers, one that
            averages while ``average`` is True, or as ``DataParallelBuilder``.
          TypeError: a mode that is neither a name nor a function, or an ``average``
            that is not a bool.
        """
        super().__init__(
            towers, flat_below_bytes=flat_below_bytes, flat_group=flat_group
        )
        check_flag(average=average)
        reducer: Any = mode
        if mode is None:
            reducer = all_reduce(self.devices)
        elif isinstance(mode, str):
            reducer = reducer_for_mode(mode, self.devices)
        if not (callable(reducer) or is_stateful(reducer)):
            raise TypeError(
                "SyncMultiGPUReplicatedBuilder: mode must be a name or a reducer; got "
                f"{mode!r}."
            )
        if average:
            check_adds(mode=reducer)
        elif not is_stateful(reducer):
            check_reducer(mode=reducer)
        self._reducer_is_given = reducer is mode
        self._average = average
        self._reducer: Reducer = reducer
        self.grads: list[list[tuple[Any, tf.Variable]]] | Any = None

    def _train_op(
        self,
        packed: Gradients,
        get_opt_fn: Callable[[], Any],
        weights: Sequence[Any] | None,
    ) -> Any:
        reduce = with_memory(self._reducer, packed.variables, self.devices)
        if self._average:
            reduce = mean(reduce, weights=weights)
        variables = packed.variables
        reduced = reduce(packed)
        self.grads = merge_grad_list(reduced, variables)
        if self._reducer_is_given:
            try:
                check_replicated_grad_list(self.grads)
            except (TypeError, ValueError) as error:
                raise type(error)(f"From the reducer: {error}") from error
        optimizers = one_optimizer_per_tower(self._towers, get_opt_fn)
        applied = Gradients(reduced, variables, packed.tests)
        return apply_to_replicas(self._towers, applied, optimizers)

    @staticmethod
    def get_post_init_ops() -> tf.Operation:
        """Builds the op that copies tower 0's variables to the replicas.

        Variables are matched by the tower that made them. Those that cannot be copied
        are named in the log. An imported graph has no such record: there local
        variables are matched by name, which is logged.

        Raises:
          ValueError: a trainable variable that cannot be copied.
        """
        return build_sync_op()
