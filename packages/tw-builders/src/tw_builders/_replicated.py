"""Synchronous training with a copy of the variables on every device."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tw_builders._apply import apply_gradients
from tw_builders._callers import naming
from tw_builders._data_parallel import (
    DataParallelBuilder,
    check_session_graph,
    check_tower_count,
)
from tw_builders._optimizers import one_optimizer_per_tower
from tw_builders._sync_variables import build_sync_op
from tw_core import (
    check_replicated_grad_list,
    ensure_gradient_shapes,
    merge_grad_list,
    split_grad_list,
)
from tw_core.checks import check_flag, check_function
from tw_reduce import mean, reducer_for_mode

_T = TypeVar("_T")
Reducer = Callable[[Sequence[Sequence[Any]]], list[list[Any]]]


class SyncMultiGPUReplicatedBuilder(DataParallelBuilder):
    """Every tower has its variables, and applies the same reduced gradients.

    Attributes:
      grads: after ``build``, [K][N] (reduced gradient, variable) pairs.
    """

    def __init__(
        self, towers: Sequence[int | str], average: bool, mode: str | Reducer
    ) -> None:
        """Chooses the reduction.

        Args:
          towers: ints (GPU numbers) and device strings.
          average: whether towers apply the mean of the gradients, or their sum.
          mode: a reducer of ``tw_reduce`` (it shall add; with ``average`` this
            class divides), or one of the older names ``"cpu"``, ``"gpu"``,
            ``"nccl"``, ``"hierarchical"``, ``"collective"``.

        Raises:
          ValueError: an unknown mode, one that does not fit the towers, or as
            ``DataParallelBuilder``.
          TypeError: a mode that is neither name nor function, or ``average`` no bool.
        """
        super().__init__(towers)
        check_flag("SyncMultiGPUReplicatedBuilder", average=average)
        with naming("SyncMultiGPUReplicatedBuilder"):
            reducer = (
                reducer_for_mode(mode, self.devices) if isinstance(mode, str) else mode
            )
        if not callable(reducer):
            raise TypeError(
                "SyncMultiGPUReplicatedBuilder: mode must be a name or a reducer; got "
                f"{mode!r}."
            )
        self._reduce: Reducer = mean(reducer) if average else reducer
        self.grads: list[list[tuple[Any, tf.Variable]]] | None = None

    def call_for_each_tower(  # type: ignore[override]
        self, tower_fn: Callable[[], _T]
    ) -> list[_T]:
        """Calls ``tower_fn()`` in every tower.

        The variables of towers 1 and up are local and trainable, and lie below
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
            tower_fn,
            use_vs=[not tower.is_main for tower in self._towers],
        )

    def build(
        self,
        grad_list: Sequence[Sequence[tuple[Any, tf.Variable]]],
        get_opt_fn: Callable[[], Any],
    ) -> tuple[tf.Operation, tf.Operation | None]:
        """Builds reduction and updates from the towers' gradients.

        Args:
          grad_list: [K][N] (gradient, variable) pairs.
          get_opt_fn: returns a new optimizer; called once a tower. Variables
            that it makes with ``get_variable`` are shared between the calls.

        Returns:
          The training op; and the op that copies every variable of tower 0,
          optimizer state included, to the others (None for one tower). Run that
          one after the initialisers and after restoring, or use
          ``SyncVariablesHook``.

        Raises:
          ValueError: towers that bring different gradients, or None; a variable
            that several towers share; a function that returns the same optimizer
            twice.
          TypeError: no optimizer, or a Keras 3 one.
          RuntimeError: in eager mode or a ``tf.function``.
        """
        caller = "SyncMultiGPUReplicatedBuilder.build"
        check_session_graph(caller)
        check_tower_count(grad_list, len(self.towers), caller=caller)
        check_replicated_grad_list(grad_list, caller=caller)
        check_function(caller, get_opt_fn=get_opt_fn)
        all_grads, all_vars = split_grad_list(ensure_gradient_shapes(grad_list))
        with naming(caller):
            reduced = self._reduce(all_grads)
        self.grads = merge_grad_list(reduced, all_vars)
        optimizers = one_optimizer_per_tower(self._towers, get_opt_fn, caller=caller)
        train_op = apply_gradients(self._towers, reduced, all_vars, optimizers)
        post_init_op = build_sync_op(all_vars) if len(self.towers) > 1 else None
        return train_op, post_init_op

    @staticmethod
    def get_post_init_ops() -> tf.Operation:
        """Builds the op that copies tower 0's variables to the replicas.

        Variables are matched by which tower made them. Those that cannot be copied are
        named in the log. In an imported graph, which does not tell who made them, local
        variables are matched by name and said so in the log.

        Raises:
          ValueError: a trainable variable that cannot be copied.
        """
        return build_sync_op()
