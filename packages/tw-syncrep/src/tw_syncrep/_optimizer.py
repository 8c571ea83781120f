"""The optimizer under TensorFlow's name: its arguments and methods.

TensorFlow's class (``tensorflow/python/training/sync_replicas_optimizer.py``) is
the reference for the meaning of the methods. The folder ``_transfer`` sends gradients
and ``_protocol`` runs the rounds; this module connects them.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import tensorflow as tf

from tw_core.internal import check_session_graph, check_whole_number
from tw_syncrep._arguments import (
    check_choice,
    check_loss,
    check_scope_name,
    check_wrapped,
    find_replica_index,
    read_options,
)
from tw_syncrep._checks import check_session, check_timeouts
from tw_syncrep._gradient_pairs import read_gradients
from tw_syncrep._parameters.cache import copies_for, with_masters
from tw_syncrep._parameters.packs import SMALL_BYTES
from tw_syncrep._protocol.assembly import build_sync_graph
from tw_syncrep._protocol.graph import SyncGraph
from tw_syncrep._protocol.lifecycle import build_initial_tokens_op, make_queue_runner
from tw_syncrep._session.hook import SyncReplicasHook
from tw_syncrep._timeouts.status import Status, format_status, read_status

_CLASS = "SyncReplicasOptimizer"
_WHEN_LEAVING = ("continue", "end")
_INSTEAD = (
    "Call it under tf.Graph().as_default(), outside tf.cond and tf.while_loop: the "
    "chief's rounds run independently of them. To skip a step, do not run the "
    "training op."
)


class SyncReplicasOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """Applies the mean of several replicas' gradients as one step.

    The first seven arguments are those of
    ``tf.compat.v1.train.SyncReplicasOptimizer``. Works in graph mode, with resource
    variables.

    >>> import tensorflow as tf
    >>> v1 = tf.compat.v1
    >>> with tf.Graph().as_default():  # one replica, without a cluster
    ...     w = v1.get_variable("w", initializer=4.0)
    ...     step = v1.train.get_or_create_global_step()
    ...     optimizer = SyncReplicasOptimizer(
    ...         v1.train.GradientDescentOptimizer(0.25), 1, replica_index=0
    ...     )
    ...     train_op = optimizer.minimize(w**2, step)
    ...     hook = optimizer.make_session_run_hook(is_chief=True)
    ...     with v1.train.MonitoredSession(hooks=[hook]) as session:
    ...         _ = session.run(train_op)
    ...         print(session.run(w))
    2.0
    """

    elementwise = True  # if ``opt`` is

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
        sparse_mean: Literal["replicas", "per_row"] = "replicas",
        fuse_below_bytes: int = SMALL_BYTES,
        compression: tf.DType | None = None,
        wait_timeout_s: float | None = 600.0,
        start_timeout_s: float | None = None,
        when_replica_leaves: Literal["continue", "end"] = "continue",
        elastic: bool = False,
        min_replicas: int = 1,
    ) -> None:
        """Wraps an optimizer.

        Args:
          opt: computes and applies gradients; any optimizer with TensorFlow's v1
            interface (``tw_core.OptimizerLike``).
          replicas_to_aggregate: number of gradients per step.
          total_num_replicas: number of replicas; by default, one per gradient. Extra
            ones are backups; with fewer, some contribute several gradients per step.
          variable_averages: a ``tf.train.ExponentialMovingAverage``, applied
            once per step to ``variables_to_average``.
          variables_to_average: by default, all trainable variables.
          use_locking: unused; the wrapped optimizer has its own.
          name: name of the ops and queues, the same in all processes.
          replica_index: this replica's number; by default the task of the current
            device in ``apply_gradients``, else TF_CONFIG's.
          sparse_mean: "replicas" divides a sparse sum by the number of replicas,
            "per_row" each row by the replicas that touched it, like TensorFlow.
          fuse_below_bytes: gradients smaller than this are sent to a server together.
          compression: a float type, e.g. ``tf.bfloat16``, to which wider gradients
            are cast in transit.
          wait_timeout_s: longest wait for a step, in seconds; None for no bound.
          start_timeout_s: longest wait for other replicas to start, in seconds; by
            default ``wait_timeout_s``.
          when_replica_leaves: "continue" with the others, or "end" the run for all.
          elastic: whether the run goes on without the missing replicas when a wait
            reaches ``wait_timeout_s``, instead of raising; they rejoin when they
            return. If the chief is lost, another replica takes over.
          min_replicas: with fewer, an elastic run ends as any other does.

        Raises:
          ValueError: a count, a choice, a timeout or a name is invalid.
          TypeError: an argument has the wrong type.
        """
        check_wrapped(
            opt,
            variable_averages=variable_averages,
            variables_to_average=variables_to_average,
            use_locking=use_locking,
        )
        check_scope_name(name)
        if replica_index is not None:
            check_whole_number(replica_index=replica_index, at_least=0)
        super().__init__(use_locking, name)
        self._options = read_options(
            replicas_to_aggregate,
            total_num_replicas,
            fuse_below_bytes=fuse_below_bytes,
            compression=compression,
            sparse_mean=sparse_mean,
            elastic=elastic,
            min_replicas=min_replicas,
        )
        check_choice("when_replica_leaves", when_replica_leaves, _WHEN_LEAVING)
        start_s = wait_timeout_s if start_timeout_s is None else start_timeout_s
        check_timeouts(wait_timeout_s=wait_timeout_s, start_timeout_s=start_s)
        self.wait_timeout_s, self.start_timeout_s = wait_timeout_s, start_s
        if elastic and self.wait_timeout_s is None:
            raise ValueError(
                f"{_CLASS}: elastic=True needs a wait_timeout_s, after which missing "
                "replicas are evicted; got None."
            )
        self._opt = opt
        self._average: Any = None
        if variable_averages is not None:
            self._average = partial(variable_averages.apply, variables_to_average)
        self._replica_index = replica_index
        self._ends_all = when_replica_leaves == "end"
        self._min_replicas = min_replicas if elastic else None
        self._built: SyncGraph | None = None
        self._runner: Any = None

    @property
    def sync_graph(self) -> Any:
        """The result of ``apply_gradients``; its parts may change in any version.

        Raises:
          ValueError: called before ``apply_gradients``.
        """
        if self._built is None:
            raise ValueError(
                f"{_CLASS}: call apply_gradients() or minimize() first; it builds the "
                "queues and ops."
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
        """Names of uninitialized global variables, string [*]."""
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
        to the copies, and returns the parameters.

        Args:
          loss: scalar.
          var_list: variables to differentiate with respect to; by default all
            trainable ones.
          *args: for the wrapped optimizer.
          **kwargs: for the wrapped optimizer.

        Returns:
          [N] pairs of this replica's gradient, or None, and the variable.

        Raises:
          TypeError: ``loss`` is not a tensor, or ``var_list`` holds no variables.
        """
        check_loss(loss, var_list)
        wanted = copies_for(var_list)
        return with_masters(self._opt.compute_gradients(loss, wanted, *args, **kwargs))

    def apply_gradients(
        self,
        grads_and_vars: Any,
        global_step: tf.Variable | None = None,
        name: str | None = None,
        *,
        weight: Any = None,
    ) -> tf.Operation:
        """Builds a replica's step and the chief's round.

        Args:
          grads_and_vars: [N] pairs; a gradient may be dense, sparse or None,
            which is passed on to the wrapped optimizer.
          global_step: incremented by each step; by default the graph's global step, if
            there is one, since wrappers of optimizers often pass none.
          name: name of the ops; by default the optimizer's.
          weight: weight of this replica's gradients in the mean, such as the number of
            rows in its batch: a number or scalar tensor, 0 or more. Either every
            replica passes its own, or none does, for equal weights.
            A replica of weight 0 does not count, and its gradients may be NaN; if all
            weights are 0, the means are 0.

        Returns:
          The training op, which returns when the step has been applied.

        Raises:
          ValueError: no pairs, no global step, no number for this replica, or a
            gradient whose shape is not its variable's (dynamic shapes are checked in
            each step, with ``InvalidArgumentError``); a weight that is negative, of
            another graph, or passed with ``sparse_mean="per_row"``.
          TypeError: a gradient or variable of another kind or dtype, or an invalid
            weight.
          RuntimeError: called in eager mode, in a ``tf.function``, or in the body
            of a ``tf.cond`` or ``tf.while_loop``.
        """
        check_session_graph(
            f"{_CLASS}.apply_gradients", instead=_INSTEAD, in_bodies=False
        )
        if name is not None:
            check_scope_name(name)
        if global_step is None:
            global_step = tf.compat.v1.train.get_global_step()
        sparse_mean = self._options.sparse_mean
        grads, variables = read_gradients(
            grads_and_vars, global_step, weight=weight, sparse_mean=sparse_mean
        )
        index = find_replica_index(self._replica_index, total=self._options.total)
        self._built = build_sync_graph(
            grads,
            variables,
            replace(self._options, weighs=weight is not None),
            weight=weight,
            global_step=global_step,
            replica_index=index,
            opt=self._opt,
            average=self._average,
            name=name or self.get_name(),
        )
        self._runner = None
        return self._built.train_op

    def get_chief_queue_runner(self) -> Any:
        """Returns the ``QueueRunner`` that runs the chief's rounds.

        For sessions without the hook. When its coordinator stops, it closes the
        queues, and waiting replicas get ``OutOfRangeError``.

        Raises:
          ValueError: called before ``apply_gradients``.
        """
        graph = self.sync_graph
        if self._runner is None:
            self._runner = make_queue_runner(graph.state, graph.round_op)
        return self._runner

    def get_init_tokens_op(self, num_tokens: int = -1) -> tf.Operation:
        """Returns the op that lets replicas continue before the first step is over.

        Args:
          num_tokens: number of tokens; -1 for as many as are needed, which is 0
            unless there are fewer replicas than ``replicas_to_aggregate``.

        Raises:
          ValueError: called before ``apply_gradients``, or too few tokens.
          TypeError: not a whole number.
        """
        state = self.sync_graph.state
        check_whole_number(num_tokens=num_tokens)
        return build_initial_tokens_op(state, int(num_tokens))

    def make_session_run_hook(
        self, is_chief: bool, num_tokens: int = -1
    ) -> SyncReplicasHook:
        """Makes the hook for ``training_session`` or ``MonitoredTrainingSession``.

        Args:
          is_chief: whether this replica applies the steps.
          num_tokens: initial tokens, for the chief.

        Raises:
          TypeError: not True or False, or not a whole number.
        """
        return SyncReplicasHook(
            *(self, is_chief, num_tokens),
            ends_all=self._ends_all,
            min_replicas=self._min_replicas,
        )

    def status(self, session: Any) -> Status:
        """Reads the state of the run, in any replica's session.

        Raises:
          TypeError: ``session`` is not a session.
          ValueError: it is of another graph, or ``apply_gradients`` was not called.
        """
        graph = self.sync_graph
        check_session(session, graph.train_op.graph)
        return read_status(session.run(graph.ops.status))

    def status_line(self, session: Any) -> str:
        """Reads the state of the run as one line of text."""
        return format_status(self.status(session))

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a slot of the wrapped optimizer.

        Raises:
          TypeError: the first argument is not a variable.
        """
        variable = args[0] if args else kwargs.get("var")
        if not isinstance(variable, tf.Variable):
            raise TypeError(
                f"{_CLASS}.get_slot: the first argument must be a variable, the second "
                f"the name of a slot; got {variable!r} for the variable."
            )
        return self._opt.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> list[str]:
        """Returns the names of the wrapped optimizer's slots."""
        return list(self._opt.get_slot_names(*args, **kwargs))

    def variables(self) -> list[tf.Variable]:
        """Returns the wrapped optimizer's variables."""
        return list(self._opt.variables())
