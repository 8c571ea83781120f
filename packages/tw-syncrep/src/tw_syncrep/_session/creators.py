"""Creates and recreates the sessions of the chief and the other replicas.

Variables are initialized or restored only if the servers hold no run to continue.
These sessions examine each set of fetches and feeds once: ``Session.run`` does so in
every call, which takes about 0.1 ms of Python, hooks included, and a step of a small
model takes a few milliseconds.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tw_syncrep._errors import StartTimeoutError
from tw_syncrep._tf_compat import PreparedCall, can_prepare

_PLAIN = (np.ndarray, np.generic, bool, int, float, list, tuple)


class KnownCall:
    """One set of fetches and feeds."""

    def __init__(
        self, graph: tf.Graph, fetches: Any, feeds: Mapping[tf.Tensor, Any]
    ) -> None:
        """Takes fetches and feeds that TensorFlow has run."""
        # Fetches and feeds are identified by their ids, which must not be reused.
        self._kept = [*_leaves(fetches), *feeds]
        self._feeds = [
            (
                tensor,
                tensor.dtype.as_numpy_dtype,
                None if tensor.shape.rank is None else tensor.shape.as_list(),
            )
            for tensor in feeds
        ]
        self.prepared = PreparedCall(graph, fetches, list(feeds))

    def read(self, feed_dict: Mapping[tf.Tensor, Any]) -> list[np.ndarray] | None:
        """Returns the fed values as arrays; None if TensorFlow has to check them."""
        arrays = []
        for tensor, dtype, shape in self._feeds:
            value = feed_dict[tensor]
            if not isinstance(value, _PLAIN):
                return None
            try:
                array = np.asarray(value, dtype)
            except (TypeError, ValueError, OverflowError):
                return None
            is_changed = isinstance(value, int) and array != value
            if is_changed or not _fits(array.shape, shape):
                return None
            arrays.append(array)
        return arrays


class KnowingSession(tf.compat.v1.Session):  # type: ignore[misc]
    """A ``tf.compat.v1.Session`` that remembers the calls it has made.

    The first call of each set of fetches and feeds is TensorFlow's own, and so is any
    unusual one: with run options, fetches by name, values of an odd type or shape.
    """

    @classmethod
    def adopt(cls, session: tf.compat.v1.Session) -> tf.compat.v1.Session:
        """Makes a session remember its calls, and returns it.

        TensorFlow's creators and managers make their sessions themselves. A session
        that lacks the functions that this needs is returned as it is.
        """
        if not can_prepare(session):
            return session
        session.__class__ = cls
        session._known_calls = {}
        return session

    def run(
        self,
        fetches: Any,
        feed_dict: Any = None,
        options: Any = None,
        run_metadata: Any = None,
    ) -> Any:
        """Runs fetches, as ``tf.compat.v1.Session.run``."""
        key = None
        if options is None or not options.ByteSize():
            key = _name(fetches, feed_dict)
        known = self._known_calls.get(key)
        if known is not None:
            values = known.read(feed_dict)
            if values is not None:
                return known.prepared.run(self, values)
        result = super().run(fetches, feed_dict, options, run_metadata)
        if known is None and key is not None and _is_usual(fetches, feed_dict):
            call = KnownCall(self.graph, fetches, feed_dict or {})
            self._known_calls[key] = call
        return result


def _fits(found: tuple[int, ...], shape: list[int | None] | None) -> bool:
    if shape is None:
        return True
    return len(found) == len(shape) and all(
        size in (None, length) for length, size in zip(found, shape, strict=True)
    )


def _name(fetches: Any, feed_dict: Any) -> Hashable:
    """Returns a key that identifies fetches and feeds; None for odd feeds."""
    if not feed_dict:
        return _form(fetches), ()
    if type(feed_dict) is not dict:
        return None
    return _form(fetches), tuple(map(id, feed_dict))


def _form(fetches: Any) -> Hashable:
    kind = type(fetches)
    if kind is list or kind is tuple:
        return kind, *map(_form, fetches)
    if kind is dict:
        return kind, *[(name, _form(fetch)) for name, fetch in fetches.items()]
    return id(fetches)


def _leaves(fetches: Any) -> Iterator[Any]:
    if type(fetches) is dict:
        fetches = list(fetches.values())
    if type(fetches) not in (list, tuple):
        yield fetches
        return
    for fetch in fetches:
        yield from _leaves(fetch)


def _is_usual(fetches: Any, feed_dict: Any) -> bool:
    """Returns whether fetches are ops and tensors, and feeds other tensors."""
    fetched, fed = list(_leaves(fetches)), list(feed_dict or ())
    return (
        bool(fetched)
        and all(isinstance(fetch, (tf.Tensor, tf.Operation)) for fetch in fetched)
        and all(isinstance(tensor, tf.Tensor) for tensor in fed)
        and not set(map(id, fetched)) & set(map(id, fed))
    )


_POLL_S = 1


class HeldSessionCreator(tf.compat.v1.train.ChiefSessionCreator):  # type: ignore[misc]
    """Makes the chief's sessions; initializes only if the servers hold no run.

    TensorFlow's creator restores or initializes the variables for every new session.
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
        self._check = check  # raises if the session is no longer needed
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
            self._check()  # The servers may have been silent for a long time.
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
                f"max_wait_secs: {error.message}. Start it, or raise that bound.",
                waited_s=self._max_wait_s,
            ) from error
        return KnowingSession.adopt(session)
