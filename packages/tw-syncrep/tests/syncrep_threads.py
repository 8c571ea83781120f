"""Replicas as threads of one process, each with its own graph and session."""

import functools
import itertools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tw_syncrep import cluster, training_session

v1 = tf.compat.v1
_CONTAINERS = itertools.count()
DEADLINE_S = 60


@functools.cache
def local_cluster() -> cluster.LocalCluster:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cluster.ExposedServerWarning)
        return cluster.start_local(ps=2, workers=3)


def run_replicas(
    replicas: int, build: Callable[[Any], Any], drive: Callable[[int, Any, Any], Any]
) -> list[Any]:
    """Builds and drives replicas, and returns what each of them returned.

    Args:
      replicas: how many.
      build: takes the task, returns a model with ``hooks``.
      drive: takes replica, model and session.
    """
    container = f"test{next(_CONTAINERS)}"
    local_cluster()
    results: list[Any] = [None] * replicas

    def work(replica: int) -> None:
        try:
            results[replica] = _work(replica, container, build, drive)
        except BaseException as error:
            results[replica] = error

    threads = [
        threading.Thread(target=work, args=(r,), daemon=True) for r in range(replicas)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a replica hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _work(replica: int, container: str, build: Any, drive: Any) -> Any:
    local = local_cluster()
    task = local.task("worker", replica)
    with tf.Graph().as_default() as graph, graph.container(container):
        with v1.device(cluster.device_setter(task)):
            model = build(task)
        with training_session(
            local.target("worker", replica),
            replica == 0,
            hooks=model.hooks,
            cluster=task,
            stop_grace_period_secs=5,
            log_step_count_steps=None,
        ) as session:
            return drive(replica, model, session)
