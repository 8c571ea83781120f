"""A cluster whose servers run in this process, and whose workers run in threads."""

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import tw_core
import tw_launch

WORKERS, TOWERS = 2, 2
DEADLINE_S = 100  # for all workers together


def start_servers() -> Any:
    """Starts a parameter server and the workers, each with a device a tower."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tw_launch.ExposedServerWarning)
        config = tf.compat.v1.ConfigProto(device_count={"CPU": TOWERS})
        return tw_launch.start_local(ps=1, workers=WORKERS, config=config)


def in_all_workers(local: Any, work: Callable[[Any, str], Any]) -> list[Any]:
    """Runs ``work(task, target)`` in a thread a worker; their results.

    What a worker raises is raised here, also where it leaves others waiting.
    """
    results: dict[int, Any] = {}

    def run(index: int) -> None:
        try:
            task = local.task("worker", index)
            results[index] = work(task, local.target("worker", index))
        except BaseException as error:
            results[index] = error

    threads = [
        threading.Thread(target=run, args=(i,), name=f"worker {i}", daemon=True)
        for i in range(len(local.addresses["worker"]))
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + DEADLINE_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    for result in list(results.values()):
        if isinstance(result, BaseException):
            raise result
    waiting = [thread.name for thread in threads if thread.is_alive()]
    assert not waiting, f"{waiting} still ran after {DEADLINE_S} s"
    return [results[i] for i in range(len(threads))]


def devices_of(task: Any) -> list[str]:
    return [f"/job:worker/task:{task.index}/cpu:{k}" for k in range(TOWERS)]


def setters_of(task: Any) -> list[Any]:
    """A device function a tower: variables on the server, the rest on its device."""
    spec = tw_launch.cluster_spec(task)
    return [
        tw_core.replica_device_setter(worker_device=device, cluster=spec)
        for device in devices_of(task)
    ]
