"""Synchronous training with a copy of the variables on every device."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tw_builders._apply import (
    apply_to_replicas,
    ensure_and_pack,
    one_optimizer_per_tower,
    prefixed,
)
from tw_builders._base import (
    DataParallelBuilder,
    check_session_graph,
    check_tower_count,
)
from tw_builders._sync_variables import build_sync_op
from tw_core import Tower
from tw_core.checks import check_flag, check_function, naming, public
from tw_core.gradients import (
    GradList,
    check_replicated_grad_list,
    merge_grad_list,
    split_grad_list,
)
from tw_reduce import Reducer, all_reduce, mean, reducer_for_mode
from tw_reduce.reducers import check_weights

_T = TypeVar("_T")


class SyncMultiGPUReplicatedBuilder(DataParallelBuilder):
    """Every tower has its own variables, and applies the same reduced gradients.

    Attributes:
      grads: after ``build``, [K][N] (reduced gradient, variable) pairs; a flat variable
        stands for those packed into it.
    """

    def __init__(
        self,
        towers: Sequence[int | str | Tower],
        average: bool = True,
        mode: str | Reducer | None = None,
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
            ``tw_reduce.all_reduce``.
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
        check_flag("SyncMultiGPUReplicatedBuilder", average=average)
        with prefixed("SyncMultiGPUReplicatedBuilder"):
            if mode is None:
                reducer = all_reduce(self.devices)
            elif isinstance(mode, str):
                reducer = reducer_for_mode(mode, self.devices)
            else:
                reducer = mode
        if not callable(reducer):
            raise TypeError(
                "SyncMultiGPUReplicatedBuilder: mode must be a name or a reducer; got "
                f"{mode!r}."
            )
        if average and getattr(reducer, "averages", False):
            raise ValueError(
                "SyncMultiGPUReplicatedBuilder: mode averages already, and would be "
                "divided again; pass the reducer without tw_reduce.mean, or "
                "average=False."
            )
        self._reducer_is_given = callable(mode)
        self._average = average
        self._reducer: Reducer = reducer
        self.grads: list[list[tuple[Any, tf.Variable]]] | None = None

    def call_for_each_tower(  # type: ignore[override]
        self, tower_fn: Callable[[], _T]
    ) -> list[_T]:
        """Calls ``tower_fn()`` in every tower.

        The variables of towers 1 and up are local and trainable, and are under
        ``tower<k>/``.

        Args:
          tower_fn: builds one tower; usually returns (gradient, variable) pairs.

        Returns:
          The K results.
        """
        check_function(
            "SyncMultiGPUReplicatedBuilder.call_for_each_tower", tower_fn=tower_fn
        )
        return DataParallelBuilder.build_on_towers(
            self.towers,
            self._in_flat(tower_fn),
            use_vs=[not tower.is_main for tower in self._towers],
        )

    def build(
        self,
        grad_list: GradList,
        get_opt_fn: Callable[[], Any],
        *,
        weights: Sequence[Any] | None = None,
    ) -> tuple[tf.Operation, tf.Operation | None]:
        """Builds reduction and updates from the towers' gradients.

        Args:
          grad_list: [K][N] (gradient, variable) pairs.
          get_opt_fn: returns a new optimizer; called once per tower. Variables
            that it makes with ``get_variable`` are shared between the calls.
          weights: [K] weight of each tower's gradients in the mean, such as its
            rows; see ``tw_reduce.mean``. None for equal weights.

        Returns:
          The training op; and the op that copies every variable of tower 0,
          optimizer state included, to the other towers (None for one tower). Run the
          copy after the initialisers and after restoring, or use
          ``SyncVariablesHook``.

        Raises:
          ValueError: towers with different gradients, or with None; a variable
            that several towers share; a function that returns the same optimizer
            twice; weights without ``average``, or as ``tw_reduce.mean``.
          TypeError: something that is not an optimizer, or a Keras 3 one; weights as
            ``tw_reduce.mean``.
          RuntimeError: in eager mode or a ``tf.function``.
        """
        caller = "SyncMultiGPUReplicatedBuilder.build"
        check_session_graph(caller)
        check_tower_count(grad_list, len(self.towers), caller=caller)
        with naming(caller):
            check_replicated_grad_list(grad_list)
        check_function(caller, get_opt_fn=get_opt_fn)
        public(caller)(check_weights)(
            weights, num_towers=len(self.towers), average=self._average
        )
        all_grads, all_vars = split_grad_list(ensure_and_pack(grad_list))
        with prefixed(caller):
            reduce = mean(self._reducer, weights=weights)
            if not self._average:
                reduce = self._reducer
            self.grads = merge_grad_list(reduce(all_grads), all_vars)
        if self._reducer_is_given:
            with naming(f"{caller}: from the reducer"):
                check_replicated_grad_list(self.grads)
        optimizers = one_optimizer_per_tower(self._towers, get_opt_fn, caller=caller)
        train_op = apply_to_replicas(self._towers, self.grads, optimizers)
        post_init_op = build_sync_op(all_vars) if len(self.towers) > 1 else None
        return train_op, post_init_op

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
