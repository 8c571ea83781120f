"""Additions to TensorFlow's hooks that write checkpoints and summaries.

Rounds are held while a checkpoint is written, and only the acting chief writes.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from tw_syncrep._protocol.graph import LifecycleOps

_log = logging.getLogger("tw_syncrep")

_POLL_S = 0.002
_LONGEST_S = 30.0


class HoldRounds(tf.compat.v1.train.CheckpointSaverListener):  # type: ignore[misc]
    """Holds the rounds from before a checkpoint is written until after it."""

    def __init__(self, find: Callable[[], LifecycleOps | None]) -> None:
        """Takes a function that returns the ops; None if rounds need not be held."""
        self._find = find
        self._thread: threading.Thread | None = None

    def before_save(
        self, session: tf.compat.v1.Session, global_step_value: int
    ) -> None:
        """Returns once rounds no longer change variables."""
        del global_step_value
        ops = self._find()
        if ops is None:
            return
        asked = session.run(ops.next_hold)

        def hold() -> None:
            with contextlib.suppress(tf.errors.OpError, RuntimeError):
                session.run(ops.hold)

        self._thread = threading.Thread(
            target=hold, name="tw-syncrep-hold", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + _LONGEST_S
        while session.run(ops.held) < asked:
            if time.monotonic() > deadline or not self._thread.is_alive():
                _log.warning(
                    "SyncReplicasOptimizer: the rounds could not be held for a "
                    "checkpoint, which may mix two steps."
                )
                return
            time.sleep(_POLL_S)

    def after_save(self, session: tf.compat.v1.Session, _: int) -> None:
        """Lets the rounds go on.

        Other replicas end the hold of a chief that has been silent for a long time. Its
        checkpoint may mix two steps, and be older than those written since: it is
        removed.
        """
        if self._thread is not None and not self._thread.is_alive():
            _withdraw(session.graph)
        self.end_hold(session)

    def end_hold(self, session: tf.compat.v1.Session) -> None:
        """Lets the rounds go on, if held; a save that fails leaves them held."""
        ops, thread = self._find(), self._thread
        self._thread = None
        if thread is not None and ops is not None:
            session.run(ops.release)


def _withdraw(graph: tf.Graph) -> None:
    """Removes the last checkpoint that the graph's savers have written."""
    for saver in graph.get_collection(tf.compat.v1.GraphKeys.SAVERS):
        *kept, last = saver.last_checkpoints or [None]
        if last is None:
            continue
        _log.warning(
            "SyncReplicasOptimizer: rounds went on while checkpoint %s was written; "
            "removing it.",
            last,
        )
        tf.compat.v1.train.remove_checkpoint(last)
        saver.set_last_checkpoints(kept)
        stem = last.rpartition("-")[0]
        files = Path(last).parent.glob("*.index")
        by_time = sorted(files, key=lambda file: file.stat().st_mtime)
        newest = [str(file.with_suffix("")) for file in by_time]
        newest = [name for name in newest if name.startswith(f"{stem}-")]
        if newest:
            tf.compat.v1.train.update_checkpoint_state(
                str(Path(last).parent), newest[-1], newest
            )


class WhileActing(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Runs a hook that writes, but only while its replica acts as the chief.

    The hook begins, and makes its files, when the replica first acts.
    """

    def __init__(self, writer: Any, is_acting: Callable[[], bool]) -> None:
        """Takes the hook, and a function that returns whether the replica acts."""
        self._writer = writer
        self._is_acting = is_acting
        self._coord: Any = None
        self._created_in: Any = None
        self._has_begun = False
        self._was_asked = False

    def begin(self) -> None:
        """Adds the ops that the writer needs, before the graph is finalized."""
        # A step counter that writes nowhere adds them, and nothing else.
        tf.compat.v1.train.StepCounterHook(summary_writer=_NOWHERE).begin()

    def after_create_session(
        self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
    ) -> None:
        """Keeps the coordinator: whether the replica acts is settled after this."""
        del session
        self._coord = coord
        self._created_in = None

    def before_run(self, run_context: Any) -> Any:
        """Calls the writer, if the replica acts."""
        self._was_asked = self._begin_if_acting(run_context.session)
        return self._writer.before_run(run_context) if self._was_asked else None

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Passes the results to the writer, if it was called."""
        if self._was_asked:
            self._writer.after_run(run_context, run_values)

    def end(self, session: tf.compat.v1.Session) -> None:
        """Ends the writer, if the replica acts."""
        if self._begin_if_acting(session):
            self._writer.end(session)

    def _begin_if_acting(self, session: tf.compat.v1.Session) -> bool:
        if not self._is_acting():
            return False
        if not self._has_begun:
            self._writer.begin()
            self._has_begun = True
        if self._created_in is not session:
            self._created_in = session
            self._writer.after_create_session(session, self._coord)
        return True


_NOWHERE = object()
