"""The hook: starts a replica's part, bounds its waits, ends it in order."""

import contextlib
import logging
import threading
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core.checks import check_flag, check_whole_number
from tw_syncrep._checks import check_methods, check_session
from tw_syncrep._protocol.graph import SyncGraph, share_initial_tokens
from tw_syncrep._protocol.queues import WakeReason
from tw_syncrep._protocol.round import SUPERSEDED
from tw_syncrep._protocol.saving import HoldOps
from tw_syncrep._session.holding import HoldRounds
from tw_syncrep._session.rounds import BatchStamps, start_rounds
from tw_syncrep._timeouts.start_barrier import StartBarrier
from tw_syncrep._timeouts.status import (
    is_held_by_others,
    judge_absence,
    judge_wait,
    read_status,
)
from tw_syncrep._timeouts.watchdog import Watchdog

_log = logging.getLogger("tw_syncrep")

# Plain numbers are compared many times faster, and this is done every step.
_CLOSED, _WATCHDOG = int(WakeReason.RUN_CLOSED), int(WakeReason.WATCHDOG)
_REPLACED = int(WakeReason.REPLACED)
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
        self._stamps = BatchStamps()
        self._fenced = 0
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

    @property
    def given_up(self) -> Exception | None:
        """Why the training op is to be left behind, if it is."""
        return None if self._watchdog is None else self._watchdog.given_up

    def make_saver_listener(self) -> tf.compat.v1.train.CheckpointSaverListener:
        """Makes what holds the rounds while a ``CheckpointSaverHook`` saves.

        ``training_session`` gives it to the hook that it makes; a hook of your own
        takes it among its ``listeners``. With backups, rounds would otherwise go on
        during a save, and a checkpoint could mix two steps.
        """
        return HoldRounds(self._find_holding)

    def release(self, *, is_left: bool) -> None:
        """Ends the threads of a session that has ended.

        Args:
          is_left: whether a call was left behind in it. Then the session is closed,
            in a thread of its own, as that may not return either.

        Raises:
          TypeError: ``is_left`` is no flag.
        """
        check_flag("SyncReplicasHook.release", is_left=is_left)
        self._stop_threads()
        session, self._session = self._session, None
        if is_left and session is not None:
            threading.Thread(
                target=session.close, name="tw-syncrep-close", daemon=True
            ).start()

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

    def is_under_way(self, session: tf.compat.v1.Session, *, is_again: bool) -> bool:
        """Returns whether the servers hold a run that this chief is to go on with.

        They do where all variables have values, the run has begun and is not closed,
        and either this chief's process has begun it or another replica, whose
        gradients have counted, was heard from within ``wait_timeout_s``. Where all
        replicas start at once, none has, and the chief initializes or restores.

        Args:
          session: of this graph; need not be initialized.
          is_again: whether it is to take the place of one that was lost.

        Raises:
          TypeError: ``session`` is not a session, or ``is_again`` no flag.
          ValueError: the session is one of another graph.
        """
        graph = self._graph
        caller = "SyncReplicasHook.is_under_way"
        check_session(caller, session, graph.train_op.graph)
        check_flag(caller, is_again=is_again)
        if not self._is_chief or len(session.run(graph.uninitialized)):
            return False
        parts = session.run(graph.ops.status)
        status = read_status(parts)
        if not status.incarnation or status.is_closed:
            return False
        within_s = self.wait_timeout_s or 0.0
        return is_again or is_held_by_others(parts, graph.replica, within_s=within_s)

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
            self._rounds_stopped = start_rounds(
                session, self._graph, self._barrier.incarnation, self._end_rounds
            )
        self._stamps.begin_session(self._barrier.number)
        timeout_s, own = self.wait_timeout_s, self._graph.replica
        if timeout_s is not None:
            needed = self._graph.aggregate
            judges = [
                partial(judge, replica=own, timeout_s=timeout_s, needed=needed)
                for judge in (judge_wait, judge_absence)
            ]
            self._watchdog = Watchdog(
                session,
                ops,
                *judges,
                replica=own,
                timeout_s=timeout_s,
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
        stamp = self._stamps.begin_call()
        return tf.compat.v1.train.SessionRunArgs(
            self._graph.reply, {self._graph.stamp: stamp}
        )

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
        if reason == _WATCHDOG and error is not None:
            raise error
        if reason == _REPLACED:
            raise self._fenced_by("another session of this replica")
        self._stamps.end_call()
        self._fenced = 0
        if reason == _CLOSED:
            run_context.request_stop()

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

    def _find_holding(self) -> HoldOps | None:
        """Returns what holds the rounds, where they go on without the chief."""
        graph = self._graph
        return graph.holding if graph.aggregate < graph.replicas else None

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

    def _fenced_by(self, whom: str) -> Exception:
        """Returns what to raise where another has taken this replica's place.

        The first time it may have been an earlier session of its own, whose last call
        came late: TensorFlow then replaces the session, and makes the call again.
        """
        self._fenced += 1
        error: Exception
        reason = (
            f"SyncReplicasOptimizer: replica {self._graph.replica} gave way to {whom}"
        )
        if self._fenced == 1:
            error = tf.errors.AbortedError(None, None, f"{reason}; joining again.")
        else:
            error = RuntimeError(
                f"{reason} again. Two processes seem to run under one number: end one "
                "of them, or give it another task index."
            )
        return error

    def _end_rounds(self, error: Exception) -> None:
        """Has the training op raise what the chief's thread could not do."""
        if SUPERSEDED in str(error):
            error = self._fenced_by("another chief")
        self._failure = error
        session = self._session
        if session is None:  # released meanwhile
            return
        # Where the server is lost, the training op fails without being woken.
        with contextlib.suppress(tf.errors.OpError, RuntimeError):
            session.run(self._graph.ops.wake, options=_bounded(_ENDING_MS))

    def _stop_threads(self) -> None:
        if self._rounds_stopped is not None:
            self._rounds_stopped.set()
        if self._watchdog is not None:
            self._watchdog.stop()
        self._rounds_stopped = self._watchdog = None


def _out_of_order(called: str, missing: str) -> str:
    return (
        f"SyncReplicasHook.{called}: called before {missing}(). A session calls them "
        "in order: give the hook to training_session(hooks=[...])."
    )


def _bounded(milliseconds: int) -> Any:
    return tf.compat.v1.RunOptions(timeout_in_ms=milliseconds)
