"""A training session whose creation, calls and end are bounded.

A hook cannot do this: it is not asked while a session is made, and cannot
interrupt a call. The session lives in a thread of its own, and the caller looks
at the parameter servers while it waits.
"""

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import tensorflow as tf

from tw_syncrep._call_thread import CallThread
from tw_syncrep._errors import StartTimeoutError
from tw_syncrep._hook import SyncReplicasHook
from tw_syncrep._session_creator import ReadySessionCreator
from tw_syncrep._tf_config import TaskConfig, find_tf_config
from tw_syncrep._watch import ServerWatch

T = TypeVar("T")
_DEFAULT_TIMEOUT_S = 600.0
_AS_TENSORFLOW: Any = object()


def training_session(
    master: str = "",
    is_chief: bool = True,
    checkpoint_dir: str | None = None,
    scaffold: Any = None,
    hooks: Iterable[Any] | None = None,
    chief_only_hooks: Iterable[Any] | None = None,
    save_checkpoint_secs: Any = _AS_TENSORFLOW,
    save_summaries_steps: Any = _AS_TENSORFLOW,
    save_summaries_secs: Any = _AS_TENSORFLOW,
    config: Any = None,
    stop_grace_period_secs: float = 120,
    log_step_count_steps: Any = _AS_TENSORFLOW,
    max_wait_secs: float = 7200,
    save_checkpoint_steps: Any = _AS_TENSORFLOW,
    summary_dir: str | None = None,
    save_graph_def: bool = True,
    *,
    cluster: TaskConfig | None = None,
    wait_timeout_s: float | None = None,
    start_timeout_s: float | None = None,
) -> "TrainingSession":
    """Makes a ``MonitoredTrainingSession`` that does not wait in silence.

    The first 16 arguments are those of
    ``tf.compat.v1.train.MonitoredTrainingSession``.

    Args:
      master: target of this task's server.
      is_chief: whether to initialise variables and write checkpoints.
      checkpoint_dir: where; the chief restores from there.
      scaffold: as TensorFlow's.
      hooks: the optimizer's hook among them.
      chief_only_hooks: as TensorFlow's.
      save_checkpoint_secs: as TensorFlow's.
      save_summaries_steps: as TensorFlow's.
      save_summaries_secs: as TensorFlow's.
      config: as TensorFlow's; without ``device_filters`` in it, a replica sees
        the parameter servers and itself, so that no other replica's death
        concerns its session.
      stop_grace_period_secs: as TensorFlow's.
      log_step_count_steps: as TensorFlow's.
      max_wait_secs: longest wait for the chief's initialisation;
        ``start_timeout_s`` where that is less.
      save_checkpoint_steps: as TensorFlow's.
      summary_dir: as TensorFlow's.
      save_graph_def: as TensorFlow's.
      cluster: tasks and their addresses; by default TF_CONFIG's.
      wait_timeout_s: how long parameter servers may be silent; by default the
        hook's, else 600. Without any bound where the hook has None.
      start_timeout_s: how long creating the session may take; by default the
        hook's.

    Returns:
      The session, created.

    Raises:
      StartTimeoutError: it could not be created in time.
      ServerLostError: parameter servers did not answer in time.
    """
    all_hooks = [*(hooks or ()), *((chief_only_hooks or ()) if is_chief else ())]
    ours = [hook for hook in all_hooks if isinstance(hook, SyncReplicasHook)]
    cluster = cluster or find_tf_config()
    wait_s = _timeout(wait_timeout_s, [hook.wait_timeout_s for hook in ours])
    start_s = _timeout(start_timeout_s, [hook.start_timeout_s for hook in ours])
    config = with_device_filters(config, cluster)
    given = {
        "save_checkpoint_secs": save_checkpoint_secs,
        "save_summaries_steps": save_summaries_steps,
        "save_summaries_secs": save_summaries_secs,
        "log_step_count_steps": log_step_count_steps,
        "save_checkpoint_steps": save_checkpoint_steps,
    }
    given = {
        name: value for name, value in given.items() if value is not _AS_TENSORFLOW
    }

    def create() -> Any:
        if not is_chief:
            longest = max_wait_secs if start_s is None else min(max_wait_secs, start_s)
            return tf.compat.v1.train.MonitoredSession(
                ReadySessionCreator(scaffold, master, config, max_wait_s=longest),
                hooks=all_hooks,
                stop_grace_period_secs=stop_grace_period_secs,
            )
        return tf.compat.v1.train.MonitoredTrainingSession(
            master=master,
            is_chief=True,
            checkpoint_dir=checkpoint_dir,
            scaffold=scaffold,
            hooks=list(hooks or ()),
            chief_only_hooks=list(chief_only_hooks or ()),
            config=config,
            stop_grace_period_secs=stop_grace_period_secs,
            max_wait_secs=max_wait_secs,
            summary_dir=summary_dir,
            save_graph_def=save_graph_def,
            **given,
        )

    return TrainingSession(
        create,
        servers=_servers(cluster),
        wait_timeout_s=wait_s,
        start_timeout_s=start_s,
        unanswered=lambda: any(hook.is_unanswered for hook in ours),
    )


class TrainingSession:
    """What ``training_session`` returns; used as a ``MonitoredSession`` is."""

    def __init__(
        self,
        create: Callable[[], Any],
        *,
        servers: Mapping[str, str],
        wait_timeout_s: float | None,
        start_timeout_s: float | None,
        unanswered: Callable[[], bool],
    ) -> None:
        """Creates the session in a thread of its own."""
        self._servers = servers
        self._wait_timeout_s = wait_timeout_s
        self._unanswered = unanswered
        self._graph = tf.compat.v1.get_default_graph()
        self._thread = CallThread(self._graph.as_default())
        watch = self._watch("creating the session", limit_s=start_timeout_s)
        try:
            self._session = self._thread.run(create, watch.look)
        except tf.errors.DeadlineExceededError as error:
            self._thread.end()
            raise StartTimeoutError(
                "training_session: the chief has not initialised the variables within "
                f"{start_timeout_s} s (start_timeout_s): {error.message}. Start it, or "
                "raise start_timeout_s."
            ) from error
        except BaseException:
            self._thread.end()
            raise

    @property
    def graph(self) -> tf.Graph:
        """The graph that was launched."""
        return self._graph

    def run(
        self,
        fetches: Any,
        feed_dict: Any = None,
        options: Any = None,
        run_metadata: Any = None,
    ) -> Any:
        """Runs ops and tensors, as ``tf.compat.v1.Session.run``.

        Raises:
          SyncTimeoutError: a wait took too long.
        """
        return self._call(
            "a step",
            lambda: self._session.run(fetches, feed_dict, options, run_metadata),
        )

    def run_step_fn(self, step_fn: Callable[[Any], Any]) -> Any:
        """Runs a function of a step context, as ``MonitoredSession.run_step_fn``."""
        return self._call("a step", lambda: self._session.run_step_fn(step_fn))

    def should_stop(self) -> bool:
        """Whether the training is over."""
        return bool(self._session.should_stop())

    def close(self) -> None:
        """Ends in order.

        Raises:
          SyncTimeoutError: parameter servers did not answer in time.
        """
        self._end(self._session.close)

    def __enter__(self) -> "TrainingSession":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Ends in order; the end of the data is no error."""
        ended = self._end(lambda: self._session.__exit__(kind, error, traceback))
        return bool(ended)

    def _end(self, close: Callable[[], T]) -> T | None:
        if self._thread.is_abandoned:  # The error that did it is on its way.
            return None
        try:
            return self._call("closing the session", close)
        finally:
            self._thread.end()

    def _call(self, doing: str, call: Callable[[], T]) -> T:
        return self._thread.run(call, self._watch(doing).look)

    def _watch(self, doing: str, *, limit_s: float | None = None) -> ServerWatch:
        return ServerWatch(
            doing,
            self._servers,
            self._wait_timeout_s,
            limit_s=limit_s,
            unanswered=self._unanswered,
        )


def with_device_filters(config: Any, cluster: TaskConfig | None) -> Any:
    """Returns a session config in which a task sees itself and the servers only."""
    if cluster is None or (config is not None and config.device_filters):
        return config
    filtered = tf.compat.v1.ConfigProto()
    if config is not None:
        filtered.CopyFrom(config)
    filtered.device_filters.extend(
        ["/job:ps", f"/job:{cluster.job}/task:{cluster.index}"]
    )
    return filtered


def _servers(cluster: TaskConfig | None) -> dict[str, str]:
    addresses = cluster.addresses.get("ps", ()) if cluster is not None else ()
    return {f"ps {index}": address for index, address in enumerate(addresses)}


def _timeout(given: float | None, of_hooks: list[float | None]) -> float | None:
    if given is not None:
        return given
    if not of_hooks:
        return _DEFAULT_TIMEOUT_S
    bounds = [seconds for seconds in of_hooks if seconds is not None]
    return max(bounds) if len(bounds) == len(of_hooks) else None
