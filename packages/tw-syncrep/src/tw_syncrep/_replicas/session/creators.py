"""How the sessions of the chief and the other replicas are made, and made again.

Variables are initialized or restored only if the servers hold no run to continue.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tw_syncrep._errors import StartTimeoutError
from tw_syncrep._replicas.session.known_calls import KnowingSession

_POLL_S = 1


class HeldSessionCreator(tf.compat.v1.train.ChiefSessionCreator):  # type: ignore[misc]
    """Makes the chief's sessions; initializes only if the servers hold no run.

    TensorFlow's own restores or initializes the variables whenever it makes a session.
    That would undo steps if the parameter servers and other replicas have gone on.
    """

    def __init__(
        self,
        scaffold: Any,
        master: str,
        config: Any,
        checkpoint_dir: str | None,
        *,
        is_held: Callable[[tf.compat.v1.Session, bool], bool],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Keeps the arguments of ``tf.compat.v1.train.ChiefSessionCreator``."""
        super().__init__(scaffold, master, config, checkpoint_dir)
        self._scaffold = scaffold
        self._master = master
        self._config = config
        self._is_held = is_held  # takes a session, and whether it is not the first
        self._check = check  # raises if nobody waits for a session any more
        self._has_created = False

    def create_session(self) -> tf.compat.v1.Session:
        """Returns a session whose variables have values."""
        self._check()
        self._scaffold.finalize()
        session = tf.compat.v1.Session(self._master, config=self._config)
        try:
            is_held = self._is_held(session, self._has_created)
            if is_held:
                session.run(self._scaffold.local_init_op)
        except BaseException:
            session.close()
            raise
        if not is_held:
            session.close()
            self._check()  # The servers may have been silent for long.
            session = super().create_session()
        # Only now: a failure may have left variables half restored.
        self._has_created = True
        return KnowingSession.adopt(session)


class ReadySessionCreator(tf.compat.v1.train.SessionCreator):  # type: ignore[misc]
    """Makes the sessions of replicas that wait for the chief's variables.

    TensorFlow's own creator checks every 30 seconds whether the chief has initialized
    them; a restarted worker would idle for that long.
    """

    def __init__(
        self,
        scaffold: Any,
        master: str,
        config: Any,
        *,
        max_wait_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Keeps the arguments of ``tf.compat.v1.train.WorkerSessionCreator``."""
        self._scaffold = scaffold or tf.compat.v1.train.Scaffold()
        self._master = master
        self._config = config
        self._max_wait_s = max_wait_s
        self._check = check

    def create_session(self) -> tf.compat.v1.Session:
        """Returns a session whose variables are initialized."""
        self._check()
        self._scaffold.finalize()
        manager = tf.compat.v1.train.SessionManager(
            local_init_op=self._scaffold.local_init_op,
            ready_op=self._scaffold.ready_op,
            ready_for_local_init_op=self._scaffold.ready_for_local_init_op,
            graph=tf.compat.v1.get_default_graph(),
            recovery_wait_secs=_POLL_S,
        )
        try:
            session = manager.wait_for_session(
                self._master, config=self._config, max_wait_secs=self._max_wait_s
            )
        except tf.errors.DeadlineExceededError as error:
            raise StartTimeoutError(
                "training_session: the chief has not initialized the variables within "
                f"{self._max_wait_s:g} s, the lesser of start_timeout_s and "
                f"max_wait_secs: {error.message}. Start it, or raise that.",
                waited_s=self._max_wait_s,
            ) from error
        return KnowingSession.adopt(session)
