"""A cluster whose servers run in this process, and whose workers run in threads."""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import tw_core
from tw_syncrep import cluster

WORKERS, TOWERS = 2, 2
DEADLINE_S = 100


def start_servers() -> Any:
    """Starts a parameter server and the workers, each with a device a tower."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cluster.ExposedServerWarning)
        config = tf.compat.v1.ConfigProto(device_count={"CPU": TOWERS})
        return cluster.start_local(ps=1, workers=WORKERS, config=config)


def in_all_workers(local: Any, work: Callable[[Any, str], Any]) -> list[Any]:
    """Runs ``work(task, target)`` in a thread a worker; their results."""
    results: list[Any] = [None] * WORKERS

    def run(index: int) -> None:
        try:
            task = local.task("worker", index)
            results[index] = work(task, local.target("worker", index))
        except BaseException as error:
            results[index] = error

    threads = [
        threading.Thread(target=run, args=(index,), daemon=True)
        for index in range(WORKERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def devices_of(task: Any) -> list[str]:
    return [f"/job:worker/task:{task.index}/cpu:{k}" for k in range(TOWERS)]


def setters_of(task: Any) -> list[Any]:
    """A device function a tower: variables on the server, the rest on its device."""
    spec = cluster.cluster_spec(task)
    return [
        tw_core.replica_device_setter(worker_device=device, cluster=spec)
        for device in devices_of(task)
    ]
