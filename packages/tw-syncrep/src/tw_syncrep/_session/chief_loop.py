"""The chief's thread: one round after the other until its session ends.

It is not one of the coordinator's threads: those are waited for at the end, and
this one waits for gradients that then do not come. Closing the session ends it.
"""

import threading
from collections.abc import Callable

import tensorflow as tf


class ChiefLoop:
    """Runs the chief's rounds in a thread."""

    def __init__(
        self,
        session: tf.compat.v1.Session,
        round_op: tf.Operation,
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Starts.

        Args:
          session: not wrapped.
          round_op: one round.
          on_failure: gets what a round raised, unless ``stop`` was called. A
            round that lost its server is among that: the replica's own step
            need not have noticed, and the session must be made anew.
        """
        self._round = session.make_callable(round_op)
        self._on_failure = on_failure
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="tw-syncrep-chief", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Begins no further round, and reports no failure any more."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._round()
            except Exception as error:
                if not self._stopped.is_set():
                    self._on_failure(error)
                return
