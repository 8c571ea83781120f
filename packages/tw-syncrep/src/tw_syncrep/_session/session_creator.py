"""Makes the sessions of replicas that are not the chief.

TensorFlow's own creator looks every 30 seconds whether the chief has initialised
the variables; a restarted worker would idle for that long.
"""

from typing import Any

import tensorflow as tf

from tw_syncrep._timeouts.errors import StartTimeoutError

_LOOK_EVERY_S = 1


class ReadySessionCreator(tf.compat.v1.train.SessionCreator):  # type: ignore[misc]
    """Waits for the chief's variables, looking every second."""

    def __init__(
        self, scaffold: Any, master: str, config: Any, *, max_wait_s: float
    ) -> None:
        """Keeps the arguments of ``tf.compat.v1.train.WorkerSessionCreator``."""
        self._scaffold = scaffold or tf.compat.v1.train.Scaffold()
        self._master = master
        self._config = config
        self._max_wait_s = max_wait_s

    def create_session(self) -> tf.compat.v1.Session:
        """Returns a session whose variables are initialised.

        Raises:
          StartTimeoutError: they are not, after the longest wait.
        """
        self._scaffold.finalize()
        manager = tf.compat.v1.train.SessionManager(
            local_init_op=self._scaffold.local_init_op,
            ready_op=self._scaffold.ready_op,
            ready_for_local_init_op=self._scaffold.ready_for_local_init_op,
            graph=tf.compat.v1.get_default_graph(),
            recovery_wait_secs=_LOOK_EVERY_S,
        )
        try:
            return manager.wait_for_session(
                self._master, config=self._config, max_wait_secs=self._max_wait_s
            )
        except tf.errors.DeadlineExceededError as error:
            raise StartTimeoutError(
                "training_session: the chief has not initialised the variables within "
                f"{self._max_wait_s:g} s, the lesser of start_timeout_s and "
                f"max_wait_secs: {error.message}. Start it, or raise that.",
                waited_s=self._max_wait_s,
            ) from error
