"""The hook: starts a replica's part, bounds its waits, ends it in order."""

import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core.checks import check_flag, check_whole_number
from tw_syncrep._checks import check_methods, check_session
from tw_syncrep._protocol.graph import SyncGraph, share_initial_tokens
from tw_syncrep._protocol.queues import WakeReason
from tw_syncrep._timeouts.errors import SyncTimeoutError
from tw_syncrep._timeouts.status import Status, judge_wait
from tw_syncrep._timeouts.waits import StartBarrier, Watchdog

_log = logging.getLogger("tw_syncrep")

# Plain numbers are compared many times faster, and this is done every step.
_CLOSED, _WATCHDOG = int(WakeReason.RUN_CLOSED), int(WakeReason.WATCHDOG)
_ENDING_MS = 10_000


class SyncReplicasHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Made by ``SyncReplicasOptimizer.make_session_run_hook``."""

    def __init__(
        self,
        optimizer: Any,
        is_chief: bool,
        num_tokens: int = -1,
        *,
        ends_all: bool = False,
    ) -> None:
        """Keeps the arguments; the graph is read in ``begin``.

        Args:
          optimizer: the ``SyncReplicasOptimizer`` whose hook it is.
          is_chief: whether this replica runs the rounds.
          num_tokens: as for ``get_init_tokens_op``.
          ends_all: whether the run ends when this replica leaves.

        Raises:
          TypeError: an argument is of another type.
        """
        if not hasattr(type(optimizer), "sync_graph"):
            raise TypeError(
                "SyncReplicasHook: optimizer must be a SyncReplicasOptimizer; got "
                f"{optimizer!r}."
            )
        check_flag("SyncReplicasHook", is_chief=is_chief)
        check_whole_number("SyncReplicasHook", num_tokens=num_tokens)
        check_flag("SyncReplicasHook", ends_all=ends_all)
        self._optimizer = optimizer
        self._is_chief = is_chief
        self._num_tokens = num_tokens
        self._ends_all = ends_all
        self._watchdog: Watchdog | None = None
        self._rounds_stopped: threading.Event | None = None
        self._failure: Exception | None = None
        self._waits = False
        self._session: Any = None
        self._begun: SyncGraph | None = None

    @property
    def wait_timeout_s(self) -> float | None:
        """Longest wait for a step, in seconds."""
        timeout_s: float | None = self._optimizer.wait_timeout_s
        return timeout_s

    @property
    def start_timeout_s(self) -> float | None:
        """Longest wait for the others' start, in seconds."""
        timeout_s: float | None = self._optimizer.start_timeout_s
        return timeout_s

    @property
    def is_unanswered(self) -> bool:
        """Whether the server is silent though a wait has taken too long."""
        return self._watchdog is not None and self._watchdog.is_unanswered

    def begin(self) -> None:
        """Gets the ops.

        Raises:
          ValueError: the optimizer has built none yet, or too few tokens.
        """
        try:
            graph: SyncGraph = self._optimizer.sync_graph
        except ValueError:
            raise ValueError(
                "SyncReplicasOptimizer.apply_gradient should be called before using "
                "the hook: call apply_gradients() or minimize() first."
            ) from None
        self._begun = graph
        self._known_fetches: dict[tuple[str, ...], bool] = {}
        if self._is_chief:
            self._initial = share_initial_tokens(
                self._num_tokens, aggregate=graph.aggregate, replicas=graph.replicas
            )

    def after_create_session(
        self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
    ) -> None:
        """Joins the run; the chief opens it and starts its thread.

        Raises:
          RuntimeError: variables have no value; all are named.
          TypeError: ``session`` is not a session, or ``coord`` not a coordinator.
          ValueError: the session is one of another graph.
        """
        caller = "SyncReplicasHook.after_create_session"
        check_session(caller, session, self._graph.train_op.graph)
        check_methods(caller, ["request_stop"], "a tf.train.Coordinator", coord=coord)
        self._stop_threads()
        ops = self._graph.ops
        self._barrier = StartBarrier(self._graph, session)
        self._failure = None
        self._session = session
        if not self._is_chief:
            self._barrier.join(ops.join)
        else:
            self._barrier.join(ops.open, {ops.initial: self._initial})
            self._rounds_stopped = _start_rounds(
                session, self._graph.round_op, self._fail
            )
        if self.wait_timeout_s is not None:
            self._watchdog = Watchdog(
                session,
                ops,
                self._judge,
                replica=self._graph.replica,
                timeout_s=self.wait_timeout_s,
                replace_session=partial(self._replace_session, session, coord),
            )

    def before_run(self, run_context: Any) -> Any:
        """Waits for the others before the first step, and begins a wait.

        Raises:
          RuntimeError: called before ``after_create_session``.
          TypeError: ``run_context`` is none of a session's.
        """
        self._check_started("before_run")
        if not hasattr(run_context, "original_args"):
            raise TypeError(
                "SyncReplicasHook.before_run: run_context must be a session's; got "
                f"{run_context!r}."
            )
        self._waits = self._is_training(run_context.original_args.fetches)
        if not self._waits:
            return None
        if self._failure is not None:
            raise self._failure
        if not self._barrier.is_passed:
            self._barrier.wait(run_context.session, timeout_s=self.start_timeout_s)
        if self._watchdog is not None:
            self._watchdog.begin_wait()
        return tf.compat.v1.train.SessionRunArgs(self._graph.reply)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Raises what ended the wait, or has the session stop.

        Raises:
          RuntimeError: called before ``after_create_session``.
        """
        self._check_started("after_run")
        if not self._waits:
            return
        error = self._failure
        if self._watchdog is not None:
            error = error or self._watchdog.error
            self._watchdog.end_wait()
        reason = int(run_values.results[-1])
        if reason == _CLOSED:
            run_context.request_stop()
        elif reason == _WATCHDOG and error is not None:
            raise error

    def end(self, session: tf.compat.v1.Session) -> None:
        """Leaves in order; the chief ends the run for all.

        Raises:
          RuntimeError: called before ``after_create_session``.
          TypeError: ``session`` is not a session.
          ValueError: it is one of another graph.
        """
        self._check_started("end")
        check_session("SyncReplicasHook.end", session, self._graph.train_op.graph)
        self._stop_threads()
        ops = self._graph.ops
        farewell = [ops.close] if self._is_chief or self._ends_all else [ops.leave]
        try:
            session.run(farewell, options=_bounded(_ENDING_MS))
        except tf.errors.OpError as error:
            _log.warning("Could not leave in order; others will wait: %s", error)

    @property
    def _graph(self) -> SyncGraph:
        """What ``begin`` has got."""
        if self._begun is None:
            raise RuntimeError(_out_of_order("after_create_session", "begin"))
        return self._begun

    def _is_training(self, fetches: Any) -> bool:
        """Returns whether a call runs the training op.

        A hook may fetch what the training op returned, but only where it runs anyway:
        fetching it in a call for evaluation would make that call a step.
        """
        leaves = tf.nest.flatten(fetches, expand_composites=True)
        key = tuple(leaf if isinstance(leaf, str) else leaf.name for leaf in leaves)
        if key not in self._known_fetches:
            self._known_fetches[key] = self._graph.runs_step(leaves)
        return self._known_fetches[key]

    def _check_started(self, called: str) -> None:
        if self._session is None:
            raise RuntimeError(_out_of_order(called, "after_create_session"))

    def _judge(self, status: Status) -> SyncTimeoutError | None:
        return judge_wait(
            status,
            self._graph.replica,
            timeout_s=self.wait_timeout_s or 0.0,
            needed=self._graph.aggregate,
        )

    def _replace_session(
        self, session: tf.compat.v1.Session, coord: tf.train.Coordinator, reason: str
    ) -> None:
        """Has a call that will not return fail as if its server had restarted."""
        _log.warning("%s", reason)
        if self._rounds_stopped is not None:
            self._rounds_stopped.set()
        error = tf.errors.AbortedError(None, None, reason)
        # Of an error that was not raised, the coordinator wants all three parts.
        coord.request_stop((type(error), error, None))
        session.close()

    def _fail(self, error: Exception) -> None:
        """Has the training op raise what the chief's thread could not do."""
        self._failure = error
        # Where the server is lost, the training op fails without being woken.
        with contextlib.suppress(tf.errors.OpError, RuntimeError):
            self._session.run(self._graph.ops.wake, options=_bounded(_ENDING_MS))

    def _stop_threads(self) -> None:
        if self._rounds_stopped is not None:
            self._rounds_stopped.set()
        if self._watchdog is not None:
            self._watchdog.stop()
        self._rounds_stopped = self._watchdog = None


def _start_rounds(
    session: tf.compat.v1.Session,
    round_op: tf.Operation,
    on_failure: Callable[[Exception], None],
) -> threading.Event:
    """Starts a thread that runs the chief's rounds until its session is closed.

    It is not one of the coordinator's threads: those are waited for at the end, and
    this one waits for gradients that then do not come.

    Args:
      session: not wrapped.
      round_op: one round.
      on_failure: gets what a round raised, such as the loss of its server, which the
        replica's own step need not have noticed: the session must be replaced.

    Returns:
      Once it is set, no further round begins and no failure is reported.
    """
    run_round = session.make_callable(round_op)
    stopped = threading.Event()

    def run() -> None:
        while not stopped.is_set():
            try:
                run_round()
            except Exception as error:
                if not stopped.is_set():
                    on_failure(error)
                return

    threading.Thread(target=run, name="tw-syncrep-chief", daemon=True).start()
    return stopped


def _out_of_order(called: str, missing: str) -> str:
    return (
        f"SyncReplicasHook.{called}: called before {missing}(). A session calls them "
        "in order: give the hook to training_session(hooks=[...])."
    )


def _bounded(milliseconds: int) -> Any:
    return tf.compat.v1.RunOptions(timeout_in_ms=milliseconds)
