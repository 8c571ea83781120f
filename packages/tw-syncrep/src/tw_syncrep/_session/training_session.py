"""``training_session``: a session with bounds taken from the cluster and the hooks."""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core.internal import check_flag, check_kind, check_number, check_text
from tw_launch import TaskConfig, find_tf_config, with_device_filters
from tw_syncrep._checks import check_methods
from tw_syncrep._session.bounded_session import SessionCalls, TrainingSession
from tw_syncrep._session.creators import HeldSessionCreator, ReadySessionCreator
from tw_syncrep._session.holding import WhileActing
from tw_syncrep._session.hook import SyncReplicasHook

_DEFAULT_TIMEOUT_S = 600.0
_AS_TENSORFLOW: Any = object()
_CALLER = "training_session"
_DEFAULTS: dict[tuple[str, ...], tuple[Any, ...]] = {
    ("save_checkpoint_secs", "save_checkpoint_steps"): (600, None),
    ("save_summaries_steps", "save_summaries_secs"): (100, None),
    ("log_step_count_steps",): (100,),
}
"""Defaults of ``MonitoredTrainingSession``, where none of the names is passed."""


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
) -> TrainingSession:
    """Makes a ``MonitoredTrainingSession`` whose waits are bounded.

    The first 16 arguments are those of
    ``tf.compat.v1.train.MonitoredTrainingSession``.

    Args:
      master: target of this task's server.
      is_chief: whether to initialize variables and write checkpoints; in an elastic
        run, the replica that acts as the chief writes them.
      checkpoint_dir: folder of checkpoints, from which the chief restores.
      scaffold: as in TensorFlow.
      hooks: hooks, including the optimizer's.
      chief_only_hooks: as in TensorFlow.
      save_checkpoint_secs: as in TensorFlow.
      save_summaries_steps: as in TensorFlow.
      save_summaries_secs: as in TensorFlow.
      config: as in TensorFlow; without ``device_filters`` in it, a replica sees
        only the parameter servers and itself, so that no other replica's death
        affects its session.
      stop_grace_period_secs: as in TensorFlow.
      log_step_count_steps: as in TensorFlow.
      max_wait_secs: longest wait for the chief's initialization, in seconds;
        ``start_timeout_s`` if that is less.
      save_checkpoint_steps: as in TensorFlow.
      summary_dir: as in TensorFlow.
      save_graph_def: as in TensorFlow.
      cluster: tasks and their addresses; by default TF_CONFIG's.
      wait_timeout_s: longest time, in seconds, in which parameter servers are silent or
        cut off from each other, or the session is recreated; by default the hook's, or
        600 without a hook. No bound if the hook has None. In an elastic run, a replica
        that no server answers waits ``start_timeout_s`` longer.
      start_timeout_s: longest creation of the session, in seconds; by default the
        hook's.

    Returns:
      The created session.

    Raises:
      TypeError: an argument is of the wrong type.
      ValueError: a timeout is not above 0, or a number is NaN.
      StartTimeoutError: it could not be created in time.
      ServerLostError: parameter servers did not answer in time.
      ReplicaReplacedError: another process has been started as this replica.
    """
    check_flag(is_chief=is_chief)
    check_kind(TaskConfig | None, "a tw_launch.TaskConfig, or None", cluster=cluster)
    arguments = {
        "master": master,
        "checkpoint_dir": _read_folder(checkpoint_dir=checkpoint_dir),
        "scaffold": scaffold,
        "hooks": _read_hooks(hooks=hooks),
        "chief_only_hooks": _read_hooks(chief_only_hooks=chief_only_hooks),
        "save_checkpoint_secs": save_checkpoint_secs,
        "save_summaries_steps": save_summaries_steps,
        "save_summaries_secs": save_summaries_secs,
        "config": config,
        "stop_grace_period_secs": stop_grace_period_secs,
        "log_step_count_steps": log_step_count_steps,
        "max_wait_secs": max_wait_secs,
        "save_checkpoint_steps": save_checkpoint_steps,
        "summary_dir": _read_folder(summary_dir=summary_dir),
        "save_graph_def": save_graph_def,
    }
    _read_numbers(arguments)
    _check_arguments(arguments)
    cluster = cluster or find_tf_config()
    arguments["config"] = with_device_filters(config, cluster)
    if not is_chief:
        arguments["chief_only_hooks"] = []
    hooks = [*arguments["hooks"], *arguments["chief_only_hooks"]]
    ours = [hook for hook in hooks if isinstance(hook, SyncReplicasHook)]
    servers = cluster.addresses.get("ps", ()) if cluster is not None else ()
    start_s = _timeout(start_timeout_s, [hook.start_timeout_s for hook in ours])
    wait_s = _timeout(wait_timeout_s, [hook.wait_timeout_s for hook in ours])
    calls = SessionCalls(wait_s)
    # A replica that is cut off from an elastic run is evicted, then starts again.
    is_elastic = bool(ours) and all(hook.is_elastic for hook in ours)
    watch = {
        "patience_s": start_s if is_elastic else 0.0,
        "remade_since": lambda: calls.remade_since,
        "own": _name_own(cluster),
    }
    addresses = cluster.addresses if cluster is not None else {}
    prepare = partial(_prepare, ours, calls, addresses)
    return _ReplicasSession(
        ours,
        watch,
        partial(
            _create,
            *(arguments, ours, prepare, calls),
            is_chief=is_chief,
            start_s=start_s,
        ),
        servers={f"ps {index}": address for index, address in enumerate(servers)},
        wait_timeout_s=wait_s,
        start_timeout_s=start_s,
        unanswered=lambda: any(hook.is_unanswered for hook in ours),
        failure=lambda: next(filter(None, (hook.given_up for hook in ours)), None),
        release=partial(_release, ours, calls),
    )


class _ReplicasSession(TrainingSession):
    """A session that knows the hooks of its replicas."""

    def __init__(
        self,
        hooks: list[SyncReplicasHook],
        watch: Mapping[str, Any],
        create: Callable[[], Any],
        **arguments: Any,
    ) -> None:
        self._hooks, self._watch = hooks, watch
        super().__init__(create, **arguments)

    def _find_replaced(self) -> Exception | None:
        found = (hook._find_replaced() for hook in self._hooks)
        return next(filter(None, found), None)


def _prepare(
    ours: list[SyncReplicasHook], calls: SessionCalls, addresses: Mapping[str, Any]
) -> None:
    """Prepares for making a session, which ends other processes' of this name."""
    calls.begin_making(sum(hook._replaced for hook in ours))
    for hook in ours:
        hook._take_number(addresses, calls.check)


def _name_own(cluster: TaskConfig | None) -> str:
    """Names this task, which the servers must reach."""
    if cluster is None or cluster.address is None:
        return "this task"
    return f"this task, {cluster.job} {cluster.index}, at {cluster.address}"


def _read_folder(**given: Any) -> str | None:
    """Returns the path of a folder, if any, as a string."""
    ((_, folder),) = given.items()
    check_kind(str | os.PathLike | None, "the path of a folder", **given)
    return None if folder is None else os.fspath(folder)


def _read_hooks(**given: Any) -> list[Any]:
    """Returns the hooks of one argument; refuses values without a hook's methods."""
    ((name, hooks),) = given.items()
    if hooks is None:
        return []
    if isinstance(hooks, str) or not isinstance(hooks, Iterable):
        raise TypeError(f"{_CALLER}: {name} must be a list of hooks; got {hooks!r}.")
    found = list(hooks)
    for hook in found:
        check_methods(
            ["begin", "after_create_session", "before_run", "after_run", "end"],
            "hooks such as tf.compat.v1.train.SessionRunHook",
            **{name: hook},
        )
    return found


def _read_numbers(arguments: dict[str, Any]) -> None:
    """Fills in TensorFlow's defaults, and None where a number means never."""
    for every, defaults in _DEFAULTS.items():
        is_given = any(arguments[name] is not _AS_TENSORFLOW for name in every)
        for name, default in zip(every, defaults, strict=True):
            number = arguments[name]
            if number is _AS_TENSORFLOW:
                number = None if is_given else default
            if number is not None:
                check_number(finite=False, **{name: number})
            arguments[name] = number if number is not None and number > 0 else None


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuses arguments with which TensorFlow's session would fail later."""
    check_text(master=arguments["master"], empty=True)
    check_kind(
        tf.compat.v1.ConfigProto | None,
        "a tf.compat.v1.ConfigProto",
        config=arguments["config"],
    )
    check_kind(
        tf.compat.v1.train.Scaffold | None,
        "a tf.compat.v1.train.Scaffold",
        scaffold=arguments["scaffold"],
    )
    for name in ("stop_grace_period_secs", "max_wait_secs"):
        check_number(at_least=0, finite=False, **{name: arguments[name]})
    check_flag(save_graph_def=arguments["save_graph_def"])


def _release(ours: list[SyncReplicasHook], calls: SessionCalls, is_left: bool) -> None:
    calls.is_left = calls.is_left or is_left
    for hook in ours:
        hook.release(is_left=is_left)


def _create(
    arguments: Mapping[str, Any],
    ours: list[SyncReplicasHook],
    prepare: Callable[[], None],
    calls: SessionCalls,
    *,
    is_chief: bool,
    start_s: float | None,
) -> Any:
    """Creates the session with our own creator, for the chief or another replica."""
    scaffold = arguments["scaffold"] or tf.compat.v1.train.Scaffold()
    common = scaffold, arguments["master"], arguments["config"]
    if is_chief:
        creator: Any = HeldSessionCreator(
            *common,
            arguments["checkpoint_dir"],
            is_held=lambda session, is_again: any(
                hook.is_under_way(session, is_again=is_again) for hook in ours
            ),
            check=prepare,
        )
    else:
        longest = arguments["max_wait_secs"]
        creator = ReadySessionCreator(
            *common,
            max_wait_s=longest if start_s is None else min(longest, start_s),
            check=prepare,
        )
    saving: list[Any] = []
    elastic = [hook for hook in ours if hook.is_elastic]
    if is_chief or elastic:
        listeners = [hook.make_saver_listener() for hook in ours]
        saving = _saving_hooks(arguments, scaffold, listeners)
    if elastic:  # The replica that acts as the chief may change.

        def acts() -> bool:
            return any(hook.is_acting for hook in elastic)

        saving = [WhileActing(hook, acts) for hook in saving]
    return tf.compat.v1.train.MonitoredSession(
        creator,
        hooks=[calls, *arguments["chief_only_hooks"], *saving, *arguments["hooks"]],
        stop_grace_period_secs=arguments["stop_grace_period_secs"],
    )


def _saving_hooks(
    given: Mapping[str, Any], scaffold: Any, listeners: list[Any]
) -> list[Any]:
    """Makes the chief's hooks for steps per second, summaries and checkpoints."""
    train = tf.compat.v1.train
    hooks: list[Any] = []
    folder = given["checkpoint_dir"]
    summaries = given["summary_dir"] or folder
    every = given["log_step_count_steps"]
    if summaries and every:
        hooks.append(train.StepCounterHook(every, output_dir=summaries))
    steps, seconds = given["save_summaries_steps"], given["save_summaries_secs"]
    if summaries and (steps or seconds):
        saver = train.SummarySaverHook(
            steps, seconds, output_dir=summaries, scaffold=scaffold
        )
        hooks.append(saver)
    steps, seconds = given["save_checkpoint_steps"], given["save_checkpoint_secs"]
    if folder and (steps or seconds):
        saver = train.CheckpointSaverHook(
            folder,
            seconds,
            steps,
            scaffold=scaffold,
            listeners=listeners,
            save_graph_def=given["save_graph_def"],
        )
        hooks.append(saver)
    return hooks


def _timeout(given: float | None, of_hooks: list[float | None]) -> float | None:
    if given is not None:
        return given
    if not of_hooks:
        return _DEFAULT_TIMEOUT_S
    bounds = [seconds for seconds in of_hooks if seconds is not None]
    return max(bounds) if len(bounds) == len(of_hooks) else None
