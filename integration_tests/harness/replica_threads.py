"""Replicas as threads of one process, each with its own graph and session."""

import functools
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

import tw_launch
import tw_syncrep
from tw_syncrep import training_session

v1 = tf.compat.v1
_CONTAINERS = itertools.count()
DEADLINE_S = 200  # a busy machine takes a minute to start


@functools.cache
def local_cluster() -> tw_launch.LocalCluster:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tw_launch.ExposedServerWarning)
        return tw_launch.start_local(ps=2, workers=3)


def new_container() -> str:
    """Names resources on the servers that no other test uses."""
    return f"test{next(_CONTAINERS)}"


def run_replicas(
    replicas: int,
    build: Callable[[Any], Any],
    drive: Callable[[int, Any, Any], Any],
    *,
    container: str | None = None,
    who: Sequence[int] | None = None,
    folder: Path | None = None,
) -> list[Any]:
    """Builds and drives replicas, and returns what each of them returned.

    ``build`` takes the task and returns a model with ``hooks``; ``drive`` takes
    replica, model and session. ``who`` starts, by default all; ``container`` is an
    earlier run's.
    """
    container = container or new_container()
    local_cluster()
    found = in_threads(
        lambda replica: _work(replica, container, build, drive, folder),
        range(replicas) if who is None else who,
    )
    return [found.get(replica) for replica in range(replicas)]


def in_threads(
    work: Callable[[int], Any], who: Iterable[int], deadline_s: float = DEADLINE_S
) -> dict[int, Any]:
    """Calls ``work`` of each number in a thread; returns the results.

    What one raises is raised here, also where it leaves others waiting.
    """
    results: dict[int, Any] = {}

    def run(number: int) -> None:
        try:
            results[number] = work(number)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in who]
    for thread in threads:
        thread.start()
    until = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    for _, result in sorted(results.items(), key=lambda own: own[0]):
        if isinstance(result, BaseException):
            raise result
    assert not any(thread.is_alive() for thread in threads), "a replica hangs"
    return results


def start_by_hand(
    replica: int, build: Callable[[Any], Any], *, container: str
) -> tuple[Any, v1.Session]:
    """Builds a replica; returns the model and a session without hooks, not joined."""
    local = local_cluster()
    task = local.task("worker", replica)
    with tf.Graph().as_default() as graph, graph.container(container):
        with v1.device(tw_syncrep.device_setter(task)):
            model = build(task)
        init = [v1.global_variables_initializer(), v1.local_variables_initializer()]
        session = v1.Session(local.target("worker", replica), graph=graph)
        for op in init[1:] if replica else init:  # copies read what they are copies of
            session.run(op)
        # What a hook finds made.
        graph.finalize()
    return model, session


def _work(
    replica: int, container: str, build: Any, drive: Any, folder: Path | None
) -> Any:
    local = local_cluster()
    task = local.task("worker", replica)
    with tf.Graph().as_default() as graph, graph.container(container):
        with v1.device(tw_syncrep.device_setter(task)):
            model = build(task)
        with training_session(
            local.target("worker", replica),
            replica == 0,
            None if folder is None else str(folder),
            hooks=model.hooks,
            cluster=task,
            stop_grace_period_secs=5,
            log_step_count_steps=None,
            save_checkpoint_secs=None,
            save_checkpoint_steps=None if folder is None else 1,
        ) as session:
            return drive(replica, model, session)
