"""The hook that makes a replica join a run, bounds its waits and makes it leave."""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core.internal import Recorder, Wait, add_report, check_flag, check_whole_number
from tw_syncrep._checks import check_methods, check_session
from tw_syncrep._errors import ReplicaReplacedError, SyncTimeoutError
from tw_syncrep._protocol.graph import LifecycleOps, SyncGraph, share_initial_tokens
from tw_syncrep._protocol.queues import WakeReason
from tw_syncrep._protocol.round import SUPERSEDED
from tw_syncrep._session.holding import HoldRounds
from tw_syncrep._session.own_number import OwnNumber, find_own_number
from tw_syncrep._session.rounds import BatchStamps, ChiefRole
from tw_syncrep._timeouts.start_barrier import StartBarrier
from tw_syncrep._timeouts.status import (
    is_held_by_others,
    is_replaced,
    judge_absence,
    judge_wait,
    read_status,
)
from tw_syncrep._timeouts.steady_times import SteadyTimes
from tw_syncrep._timeouts.watchdog import Watchdog

_log = logging.getLogger("tw_syncrep")

# Plain integers compare many times faster, and every step compares them.
_CLOSED, _WATCHDOG = int(WakeReason.RUN_CLOSED), int(WakeReason.WATCHDOG)
_REPLACED = int(WakeReason.REPLACED)
_ENDING_MS = 10_000
_MOST_REPLACED = 2
"""Limit of sessions replaced in a row; a step without replacement resets the count."""


class SyncReplicasHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """A replica's hook, made by ``SyncReplicasOptimizer.make_session_run_hook``."""

    def __init__(
        self,
        optimizer: Any,
        is_chief: bool,
        num_tokens: int = -1,
        *,
        ends_all: bool = False,
        min_replicas: int | None = None,
    ) -> None:
        """Keeps the arguments; the graph is read in ``begin``.

        Args:
          optimizer: the ``SyncReplicasOptimizer`` that the hook belongs to.
          is_chief: whether this replica runs the rounds.
          num_tokens: as for ``SyncReplicasOptimizer.get_init_tokens_op``.
          ends_all: whether the run ends when this replica leaves.
          min_replicas: fewest replicas of an elastic run; None if a run ends when it
            loses a replica.

        Raises:
          TypeError: an argument is of the wrong type.
        """
        if not hasattr(type(optimizer), "sync_graph"):
            raise TypeError(
                "SyncReplicasHook: optimizer must be a SyncReplicasOptimizer; got "
                f"{optimizer!r}."
            )
        check_flag(is_chief=is_chief)
        check_whole_number(num_tokens=num_tokens)
        check_flag(ends_all=ends_all)
        if min_replicas is not None:
            check_whole_number(min_replicas=min_replicas)
        self._optimizer = optimizer
        self._is_chief = is_chief
        self._num_tokens = num_tokens
        self._ends_all = ends_all
        self._min_replicas = min_replicas
        self._watchdog: Watchdog | None = None
        self._role: ChiefRole | None = None
        self._failure: Exception | None = None
        self._waits = False
        self._stamps = BatchStamps()
        self._times = SteadyTimes()
        self._holds: list[HoldRounds] = []
        self._life = 0
        self._own_number: OwnNumber | None = None
        self._replaced = 0
        self._session: Any = None
        self._opened = 0  # the last incarnation that this chief has begun

    @property
    def wait_timeout_s(self) -> float | None:
        """Longest wait for a step, in seconds."""
        timeout_s: float | None = self._optimizer.wait_timeout_s
        return timeout_s

    @property
    def start_timeout_s(self) -> float | None:
        """Longest wait for the other replicas to start, in seconds."""
        timeout_s: float | None = self._optimizer.start_timeout_s
        return timeout_s

    @property
    def is_elastic(self) -> bool:
        """Whether the run goes on without replicas that are lost."""
        return self._min_replicas is not None

    @property
    def is_acting(self) -> bool:
        """Whether this replica applies the steps; in an elastic run, any may."""
        return self._role is not None and self._role.is_acting

    @property
    def is_unanswered(self) -> bool:
        """Whether the server has been silent for too long."""
        return self._watchdog is not None and self._watchdog.is_unanswered

    @property
    def given_up(self) -> Exception | None:
        """The reason to abandon the training op, or None."""
        return None if self._watchdog is None else self._watchdog.given_up

    def make_saver_listener(self) -> tf.compat.v1.train.CheckpointSaverListener:
        """Makes a listener that holds the rounds while a ``CheckpointSaverHook`` saves.

        ``training_session`` gives it to the hook that it makes; a hook of your own
        takes it as one of its ``listeners``. With backups, rounds would otherwise go on
        during a save, and a checkpoint could mix two steps.
        """
        self._holds.append(HoldRounds(self._find_holding))
        return self._holds[-1]

    def release(self, *, is_left: bool) -> None:
        """Ends the threads of a session that has ended.

        Args:
          is_left: whether a call was abandoned in it. Then the session is closed in
            another thread, since closing may not return either.

        Raises:
          TypeError: ``is_left`` is not a bool.
        """
        check_flag(is_left=is_left)
        self._stop_threads()
        session, self._session = self._session, None
        if is_left and session is not None:
            threading.Thread(
                target=session.close, name="tw-syncrep-close", daemon=True
            ).start()

    def _take_number(
        self, addresses: Mapping[str, Any], check: Callable[[], None]
    ) -> None:
        """Takes this replica's number before making a session, which ends others'.

        Without the addresses of servers, the session takes it when it joins.
        """
        if self._own_number is None:
            self._own_number = find_own_number(self._graph, addresses)
        if self._own_number is not None:
            self._life = self._own_number.take(self._life, check=check)

    def _find_replaced(self) -> ReplicaReplacedError | None:
        """Returns the error if a later process has taken this replica's number."""
        if self._own_number is None or not self._own_number.is_replaced(self._life):
            return None
        return ReplicaReplacedError(self._graph.replica)

    def begin(self) -> None:
        """Gets the ops from the optimizer.

        Raises:
          ValueError: the optimizer has built none yet, or there are too few tokens.
        """
        try:
            graph: SyncGraph = self._optimizer.sync_graph
        except ValueError:
            raise ValueError(
                "SyncReplicasOptimizer.apply_gradient should be called before using "
                "the hook: call apply_gradients() or minimize() first."
            ) from None
        self._events = Recorder(
            f"SyncReplicasOptimizer, replica {graph.replica} of {graph.replicas}"
        )
        self._known_fetches: dict[tuple[str, ...], bool] = {}
        self._role = ChiefRole(
            graph=graph,
            is_chief=self._is_chief,
            initial=share_initial_tokens(
                graph.state, self._num_tokens if self._is_chief else -1
            ),
            timeout_s=self.wait_timeout_s or 0.0,
            min_replicas=self._min_replicas,
            times=self._times,
            on_failure=self._end_rounds,
        )

    def is_under_way(self, session: tf.compat.v1.Session, *, is_again: bool) -> bool:
        """Returns whether the servers hold a run that this chief is to continue.

        They do if all variables have values, the run has begun and is not closed, and
        either this chief began it, in a session that was lost or raised, or another
        replica, whose gradients have counted, was heard from within
        ``wait_timeout_s``. If all replicas start at once, none has, and the chief
        initializes or restores: until it joins, no other replica changes the variables.

        Args:
          session: of this graph; need not be initialized.
          is_again: whether it replaces one that was lost.

        Raises:
          TypeError: ``session`` is not a session, or ``is_again`` not a bool.
          ValueError: the session belongs to another graph.
          ReplicaReplacedError: another process has this replica's number.
        """
        graph = self._graph
        check_session(session, graph.train_op.graph)
        check_flag(is_again=is_again)
        if not self._is_chief:
            return False
        is_held = self._finds_run(session, is_again=is_again)
        if not is_held:
            # The initialization or restore that follows may not finish.
            self._opened = 0
            ops = graph.ops
            self._life = self._life or int(session.run(ops.draw))
            if not session.run(ops.claim, {ops.life: self._life}):
                raise ReplicaReplacedError(graph.replica)
        return is_held

    def after_create_session(
        self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
    ) -> None:
        """Joins the run; the chief opens it and starts its thread.

        Raises:
          RuntimeError: variables have no value; all are named.
          ReplicaReplacedError: another process has this replica's number.
          TypeError: ``session`` is not a session, or ``coord`` not a coordinator.
          ValueError: the session belongs to another graph.
        """
        check_session(session, self._graph.train_op.graph)
        check_methods(["request_stop"], "a tf.train.Coordinator", coord=coord)
        if self._watchdog is not None:
            self._watchdog.stop()
        self._failure = None
        self._session = session
        self._barrier = StartBarrier(
            self._graph,
            session,
            life=self._life,
            at_least=self._min_replicas,
            events=self._events,
        )
        self._chief_role.begin(session, self._barrier.join)
        self._life = self._barrier.life
        if self.is_acting:
            self._opened = self._barrier.incarnation
        self._stamps.begin_session(self._barrier.number)
        if self.wait_timeout_s is not None:
            self._watchdog = self._watch(session, coord, self.wait_timeout_s)

    def _watch(
        self,
        session: tf.compat.v1.Session,
        coord: tf.train.Coordinator,
        timeout_s: float,
    ) -> Watchdog:
        graph = self._graph
        own: dict[str, Any] = {"replica": graph.replica, "timeout_s": timeout_s}
        return Watchdog(
            session,
            graph.ops,
            partial(judge_wait, needed=graph.aggregate, **own),
            partial(judge_absence, needed=graph.aggregate, **own),
            **own,
            replace_session=partial(self._replace_session, session, coord),
            recover=partial(self._chief_role.recover, session)
            if self.is_elastic
            else None,
            events=self._events,
            times=self._times,
        )

    def before_run(self, run_context: Any) -> Any:
        """Waits for the other replicas before the first step; begins the step's wait.

        Raises:
          RuntimeError: called before ``after_create_session``.
          TypeError: ``run_context`` is not a session's.
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
        for hold in self._holds:
            hold.end_hold(run_context.session)
        if not self._barrier.is_passed:
            self._barrier.wait(run_context.session, timeout_s=self.start_timeout_s)
        if self._watchdog is not None:
            self._watchdog.begin_wait()
        stamp = self._stamps.begin_call()
        return tf.compat.v1.train.SessionRunArgs(
            self._graph.reply, {self._graph.stamp: stamp}
        )

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Raises the error that ended the wait, or stops the session with the run.

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
            raise self._superseded("another session of this replica")
        self._stamps.end_call()
        if not self._stamps.is_repeated:
            self._replaced = 0
        if reason == _CLOSED:
            run_context.request_stop()

    def end(self, session: tf.compat.v1.Session) -> None:
        """Leaves the run; the chief ends it for all.

        Raises:
          RuntimeError: called before ``after_create_session``.
          TypeError: ``session`` is not a session.
          ValueError: it belongs to another graph.
        """
        self._check_started("end")
        check_session(session, self._graph.train_op.graph)
        ops, ends_run = self._graph.ops, self._ends_all or self._chief_role.ends_run
        self._stop_threads()
        farewell = [ops.close] if ends_run else [ops.leave]
        try:
            session.run(farewell, options=_bounded(_ENDING_MS))
        except tf.errors.OpError as error:
            _log.warning("Could not leave the run; others will wait: %s", error)

    def _finds_run(self, session: tf.compat.v1.Session, *, is_again: bool) -> bool:
        graph = self._graph
        if len(session.run(graph.uninitialized)):
            return False
        parts = self._times.restate(session.run(graph.ops.status))
        if is_replaced(parts, graph.replica, life=self._life):
            raise ReplicaReplacedError(graph.replica)
        status = read_status(parts)
        if not status.incarnation or status.is_closed:
            return False
        # A later incarnation is this chief's too: the reply to its beginning was lost.
        if is_again or 0 < self._opened <= status.incarnation:
            return True
        within_s = self.wait_timeout_s or 0.0
        return is_held_by_others(parts, graph.replica, within_s=within_s)

    def _find_holding(self) -> LifecycleOps | None:
        """Returns the ops that hold the rounds, if rounds go on without the chief."""
        graph = self._graph
        goes_on = self.is_elastic or graph.aggregate < graph.replicas
        return graph.ops if goes_on else None

    @property
    def _graph(self) -> SyncGraph:
        """The graph that ``begin`` got."""
        return self._chief_role.graph

    @property
    def _chief_role(self) -> ChiefRole:
        """The role that ``begin`` made."""
        if self._role is None:
            raise RuntimeError(_out_of_order("after_create_session", "begin"))
        return self._role

    def _is_training(self, fetches: Any) -> bool:
        """Returns whether a call runs the training op.

        The hook may fetch the training op's reply, but only if the op runs anyway:
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
        """Makes a call that will not return fail as if its server had restarted.

        If that has not helped before, the call fails for good.
        """
        _log.warning("%s", reason)
        self._chief_role.pause()
        self._replaced += 1
        self._events.noted("lost", f"replica {self._graph.replica}", "session")
        error: Exception = tf.errors.AbortedError(None, None, reason)
        if self._replaced > _MOST_REPLACED:
            late = SyncTimeoutError(
                f"{reason} Replacing it did not help {_MOST_REPLACED} times in a row: "
                "the step's pull or computation takes longer than wait_timeout_s "
                "allows, or is lost each time. Raise it, or check the network."
            )
            half_s = (self.wait_timeout_s or 0.0) / 2
            why = "was lost, or takes too long, in several sessions in a row"
            wait = Wait(
                who=f"replica {self._graph.replica}",
                what="the servers' reply to its step",
                waited_s=half_s,
                deadline_s=half_s,
                missing={"the reply": why},
            )
            error = add_report(late, wait, self._events)
        # For an error that was not raised, the coordinator needs all three parts.
        coord.request_stop((type(error), error, None))
        session.close()

    def _superseded(self, by: str) -> Exception:
        """Returns an error that makes TensorFlow replace the session and join again.

        If a later process has the replica's number, joining is then refused.
        """
        told = f"replica {self._graph.replica} gave way to {by}; joining again."
        error: Exception = tf.errors.AbortedError(
            None, None, f"SyncReplicasOptimizer: {told}"
        )
        return error

    def _end_rounds(self, error: Exception) -> None:
        """Makes the training op raise the error of the chief's thread."""
        session = self._session
        if session is None:  # released meanwhile
            return
        if SUPERSEDED in str(error):
            if self._chief_role.gives_way(session):
                return  # The step sees the new incarnation, and goes on in it.
            error = self._superseded("another chief")
        self._failure = error
        # If the server is lost, the training op fails without being woken.
        with contextlib.suppress(tf.errors.OpError, RuntimeError):
            session.run(self._graph.ops.wake, options=_bounded(_ENDING_MS))

    def _stop_threads(self) -> None:
        if self._role is not None:
            self._role.release()
        if self._watchdog is not None:
            self._watchdog.stop()
        self._watchdog = None


def _out_of_order(called: str, missing: str) -> str:
    return (
        f"SyncReplicasHook.{called}: called before {missing}(). A session calls them "
        "in order: pass the hook to training_session(hooks=[...])."
    )


def _bounded(milliseconds: int) -> Any:
    return tf.compat.v1.RunOptions(timeout_in_ms=milliseconds)
