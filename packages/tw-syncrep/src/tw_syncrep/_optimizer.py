"""The optimizer under TensorFlow's name: its arguments, methods and numbers.

TensorFlow's class (``tensorflow/python/training/sync_replicas_optimizer.py``) is
the reference for what the methods mean. How gradients travel, and how a round is
decided, is in the modules that this one puts together.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_syncrep._gradients import SPARSE_MEANS
from tw_syncrep._hook import SyncReplicasHook
from tw_syncrep._mirrors import SMALL, mirrors
from tw_syncrep._on_device import apart_from_the_caller, on_device
from tw_syncrep._replica_index import find_replica_index
from tw_syncrep._status import Status, format_status, read_status
from tw_syncrep._sync_graph import SyncGraph, SyncOptions, build_sync_graph
from tw_syncrep._tokens import Token

_WHEN_LEAVING = ("continue", "end")


class SyncReplicasOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """Applies the mean of several replicas' gradients as one step.

    The first seven arguments are those of
    ``tf.compat.v1.train.SyncReplicasOptimizer``. Graph mode, resource variables.

    Attributes:
      chief_init_op: what the chief runs before its first round.
      local_step_init_op: what every other replica runs before its first step.
      ready_for_local_init_op: names of global variables without a value.
    """

    def __init__(
        self,
        opt: Any,
        replicas_to_aggregate: int,
        total_num_replicas: int | None = None,
        variable_averages: Any = None,
        variables_to_average: Sequence[tf.Variable] | None = None,
        use_locking: bool = False,
        name: str = "sync_replicas",
        *,
        replica_index: int | None = None,
        sparse_mean: str = "replicas",
        fuse_below: int = SMALL,
        compression: tf.DType | None = None,
        wait_timeout_s: float | None = 600.0,
        start_timeout_s: float | None = None,
        when_replica_leaves: str = "continue",
    ) -> None:
        """Wraps an optimizer.

        Args:
          opt: computes and applies gradients; any optimizer with TensorFlow's v1
            interface (``tw_core.OptimizerLike``).
          replicas_to_aggregate: gradients that make a step.
          total_num_replicas: replicas; as many as gradients by default. More of
            them are backups; with fewer, some bring several gradients a step.
          variable_averages: a ``tf.train.ExponentialMovingAverage``, applied
            once a step to ``variables_to_average``.
          variables_to_average: for ``variable_averages``.
          use_locking: kept for its place; the wrapped optimizer has its own.
          name: of the ops and queues, the same in all processes.
          replica_index: this replica's number; by default the task of the device
            in force in ``apply_gradients``, else TF_CONFIG's.
          sparse_mean: "replicas" divides a sparse sum by the number of replicas,
            "per_row" each row by the replicas that touched it, as TensorFlow.
          fuse_below: bytes; smaller gradients to one server travel as one.
          compression: a float type, e.g. ``tf.bfloat16``, that wider gradients
            are cast to on their way.
          wait_timeout_s: longest wait for a step, in seconds; None waits forever.
          start_timeout_s: longest wait for the others' start; as
            ``wait_timeout_s`` by default.
          when_replica_leaves: "continue" with fewer, or "end" for all.

        Raises:
          ValueError: a count or a choice is none of the possible ones.
          TypeError: ``compression`` is no float type.
        """
        super().__init__(use_locking, name)
        total = (
            replicas_to_aggregate if total_num_replicas is None else total_num_replicas
        )
        _check_counts(replicas_to_aggregate, total)
        _check_choice("sparse_mean", sparse_mean, SPARSE_MEANS)
        _check_choice("when_replica_leaves", when_replica_leaves, _WHEN_LEAVING)
        start = wait_timeout_s if start_timeout_s is None else start_timeout_s
        _check_timeouts(wait_timeout_s=wait_timeout_s, start_timeout_s=start)
        if fuse_below < 0:
            raise ValueError(
                "SyncReplicasOptimizer: fuse_below must be 0 or more bytes; got "
                f"{fuse_below}."
            )
        self._opt = opt
        self._options = SyncOptions(
            aggregate=int(replicas_to_aggregate),
            total=int(total),
            below=fuse_below,
            wire_dtype=_wire_dtype(compression),
            sparse_mean=sparse_mean,
        )
        self._variable_averages = variable_averages
        self._variables_to_average = variables_to_average
        self._replica_index = replica_index
        self._when_replica_leaves = when_replica_leaves
        self.wait_timeout_s = wait_timeout_s
        self.start_timeout_s = start
        self._built: SyncGraph | None = None
        self._runner: Any = None

    @property
    def sync_graph(self) -> SyncGraph:
        """What ``apply_gradients`` built.

        Raises:
          ValueError: it was not called yet.
        """
        if self._built is None:
            raise ValueError(
                "SyncReplicasOptimizer: call apply_gradients() or minimize() first; "
                "queues and ops exist from then on."
            )
        return self._built

    @property
    def chief_init_op(self) -> tf.Operation:
        """The op that the chief runs before its first round."""
        return self.sync_graph.ops.open

    @property
    def local_step_init_op(self) -> tf.Operation:
        """The op that a replica runs before its first step."""
        return self.sync_graph.ops.join

    @property
    def ready_for_local_init_op(self) -> tf.Tensor:
        """Names of global variables that have no value yet, string [*]."""
        return self.sync_graph.uninitialized

    def compute_gradients(
        self,
        loss: Any,
        var_list: Sequence[tf.Variable] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> list[tuple[Any, tf.Variable]]:
        """Computes gradients with the wrapped optimizer.

        Where parameters have copies on the worker, it differentiates with respect
        to these, and returns the parameters.

        Args:
          loss: scalar.
          var_list: what to differentiate to; all trainable variables by default.
          *args: for the wrapped optimizer.
          **kwargs: for the wrapped optimizer.

        Returns:
          [N] pairs of this replica's gradient, or None, and the variable.
        """
        copies = {mirror.master.ref(): mirror.copy for mirror in mirrors()}
        if not copies:
            return list(self._opt.compute_gradients(loss, var_list, *args, **kwargs))
        if var_list is None:
            var_list = tf.compat.v1.trainable_variables()
        wanted = [copies.get(variable.ref(), variable) for variable in var_list]
        pairs = self._opt.compute_gradients(loss, wanted, *args, **kwargs)
        return _with_masters(pairs)

    def apply_gradients(
        self,
        grads_and_vars: Any,
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Operation:
        """Builds a replica's step and the chief's round.

        Args:
          grads_and_vars: [N] pairs; a gradient may be dense, sparse or None,
            which goes to the wrapped optimizer as it is.
          global_step: increased by one a step.
          name: of the ops; by default the optimizer's.

        Returns:
          The training op: it ends when the step has been applied.

        Raises:
          ValueError: no pair, no global step, or no number for this replica.
          TypeError: a gradient or variable of another kind.
        """
        pairs = _with_masters(grads_and_vars)
        if not pairs:
            raise ValueError(
                "SyncReplicasOptimizer.apply_gradients: Must supply at least one "
                "variable; got no (gradient, variable) pairs."
            )
        if global_step is None:
            raise ValueError(
                "SyncReplicasOptimizer.apply_gradients: Global step is required to "
                "check staleness; pass global_step="
                "tf.compat.v1.train.get_or_create_global_step()."
            )
        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        _check_resources([*variables, global_step])
        self._built = build_sync_graph(
            grads,
            variables,
            global_step=global_step,
            replica_index=find_replica_index(
                self._replica_index, total=self._options.total
            ),
            options=self._options,
            apply=lambda means: self._apply(means, variables, global_step),
            name=name or self.get_name(),
        )
        self._runner = None
        return self._built.train_op

    def get_chief_queue_runner(self) -> Any:
        """Returns the ``QueueRunner`` that runs the chief's rounds.

        For sessions without the hook. When its coordinator stops, it closes the
        queues: replicas that wait then get ``OutOfRangeError``.

        Raises:
          ValueError: called before ``apply_gradients``.
        """
        built = self.sync_graph
        if self._runner is None:
            meeting = built.meeting
            with apart_from_the_caller(), on_device(meeting.board.device):
                close = tf.group(
                    meeting.arrivals.queue.close(), meeting.waiting.close_queues()
                )
            queue = meeting.arrivals.queue
            self._runner = tf.compat.v1.train.QueueRunner(
                queue,
                [built.round_op],
                close_op=close,
                cancel_op=close,
            )
        return self._runner

    def get_init_tokens_op(self, num_tokens: int = -1) -> tf.Operation:
        """Returns the op that lets replicas go on before the first step is over.

        Args:
          num_tokens: how many; -1 is as many as are needed, which is 0 unless
            there are fewer replicas than gradients asked for.

        Raises:
          ValueError: called before ``apply_gradients``, or too few tokens.
        """
        meeting = self.sync_graph.meeting
        needed = self._options.aggregate - self._options.total
        if num_tokens == -1:
            num_tokens = max(0, needed)
        if num_tokens < max(0, needed):
            raise ValueError(
                "SyncReplicasOptimizer.get_init_tokens_op: Too few tokens to finish "
                f"the first step: {num_tokens} (given) vs {max(0, needed)} (needed)."
            )
        with apart_from_the_caller():
            share, more = divmod(num_tokens, self._options.total)
            counts = [share + (r < more) for r in range(self._options.total)]
            waiting = meeting.waiting
            return tf.group(
                *(waiting.send(r, Token.AGAIN, count=n) for r, n in enumerate(counts)),
                name="init_tokens",
            )

    def make_session_run_hook(
        self, is_chief: bool, num_tokens: int = -1
    ) -> SyncReplicasHook:
        """Makes the hook for ``training_session`` or ``MonitoredTrainingSession``.

        Args:
          is_chief: whether this replica applies the steps.
          num_tokens: initial tokens, for the chief.
        """
        return SyncReplicasHook(
            self,
            is_chief,
            num_tokens,
            ends_all=self._when_replica_leaves == "end",
        )

    def status(self, session: Any) -> Status:
        """Reads how the run stands, in any replica's session."""
        built = self.sync_graph
        return read_status(session.run(built.ops.status))

    def status_line(self, session: Any) -> str:
        """Reads how the run stands as one line of text."""
        return format_status(self.status(session))

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a slot of the wrapped optimizer."""
        return self._opt.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> list[str]:
        """Returns the names of the wrapped optimizer's slots."""
        return list(self._opt.get_slot_names(*args, **kwargs))

    def variables(self) -> list[tf.Variable]:
        """Returns the wrapped optimizer's variables."""
        return list(self._opt.variables())

    def _apply(
        self,
        means: dict[int, Any],
        variables: Sequence[tf.Variable],
        global_step: tf.Variable,
    ) -> Any:
        pairs = [(means.get(n), variable) for n, variable in enumerate(variables)]
        with on_device(global_step.device), tf.compat.v1.name_scope(""):
            update = self._opt.apply_gradients(pairs, global_step)
            if self._variable_averages is None:
                return update
            with tf.control_dependencies([update]):
                return self._variable_averages.apply(self._variables_to_average)


def _with_masters(pairs: Any) -> list[tuple[Any, tf.Variable]]:
    masters = {mirror.copy.ref(): mirror.master for mirror in mirrors()}
    return [(grad, masters.get(var.ref(), var)) for grad, var in pairs]


def _check_counts(aggregate: Any, total: Any) -> None:
    counts = {"replicas_to_aggregate": aggregate, "total_num_replicas": total}
    wrong = [
        f"{name}={count!r}"
        for name, count in counts.items()
        if isinstance(count, bool) or not isinstance(count, int) or count < 1
    ]
    if wrong:
        raise ValueError(
            "SyncReplicasOptimizer: counts must be whole numbers of at least 1; got "
            f"{', '.join(wrong)}."
        )


def _check_choice(name: str, got: str, known: Sequence[str]) -> None:
    if got not in known:
        raise ValueError(
            f"SyncReplicasOptimizer: {name} must be one of {', '.join(known)}; got "
            f"{got!r}."
        )


def _check_timeouts(**timeouts: float | None) -> None:
    wrong = [
        f"{name}={s!r}" for name, s in timeouts.items() if s is not None and s <= 0
    ]
    if wrong:
        raise ValueError(
            "SyncReplicasOptimizer: timeouts must be seconds above 0, or None to wait "
            f"forever; got {', '.join(wrong)}."
        )


def _wire_dtype(compression: Any) -> tf.DType | None:
    if compression is None:
        return None
    dtype = tf.as_dtype(compression)
    if not dtype.is_floating:
        raise TypeError(
            "SyncReplicasOptimizer: compression must be a float type such as "
            f"tf.bfloat16; got {dtype.name}."
        )
    return dtype


def _check_resources(variables: Sequence[Any]) -> None:
    strange = [
        str(getattr(variable, "name", variable))
        for variable in variables
        if not hasattr(variable, "handle")
    ]
    if strange:
        raise TypeError(
            "SyncReplicasOptimizer.apply_gradients: only resource variables work; "
            f"these are none: {', '.join(strange)}. Call "
            "tf.compat.v1.enable_resource_variables() before building the model."
        )
