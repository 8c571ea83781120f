"""Holds the rounds while TensorFlow's ``CheckpointSaverHook`` writes a checkpoint."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import tensorflow as tf

from tw_syncrep._protocol.saving import HoldOps

_log = logging.getLogger("tw_syncrep")

_POLL_S = 0.002
_LONGEST_S = 30.0


class HoldRounds(tf.compat.v1.train.CheckpointSaverListener):  # type: ignore[misc]
    """Holds the rounds from before a checkpoint is written until after it."""

    def __init__(self, find: Callable[[], HoldOps | None]) -> None:
        """Takes what returns the ops; None where rounds need not be held."""
        self._find = find
        self._thread: threading.Thread | None = None

    def before_save(
        self, session: tf.compat.v1.Session, global_step_value: int
    ) -> None:
        """Returns when no round changes variables any more."""
        del global_step_value
        ops = self._find()
        if ops is None:
            return
        asked = session.run(ops.now)
        self._thread = threading.Thread(
            target=_hold, args=(session, ops), name="tw-syncrep-hold", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + _LONGEST_S
        while session.run(ops.held) < asked:
            if time.monotonic() > deadline or not self._thread.is_alive():
                _log.warning(
                    "SyncReplicasOptimizer: the rounds could not be held for a "
                    "checkpoint; it may mix two steps."
                )
                return
            time.sleep(_POLL_S)

    def after_save(self, session: tf.compat.v1.Session, _: int) -> None:
        """Lets the rounds go on."""
        ops = self._find()
        if self._thread is not None and ops is not None:
            session.run(ops.release)
            self._thread = None


def _hold(session: tf.compat.v1.Session, ops: HoldOps) -> None:
    with contextlib.suppress(tf.errors.OpError, RuntimeError):
        session.run(ops.hold)
