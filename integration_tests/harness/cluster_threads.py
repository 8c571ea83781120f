"""A cluster whose servers run in this process, and whose workers run in threads."""

import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import tw_launch
from harness.replica_threads import in_threads

WORKERS, TOWERS = 2, 2
DEADLINE_S = 100  # for all workers together


def start_servers() -> Any:
    """Starts a parameter server and the workers, each with a device a tower."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tw_launch.ExposedServerWarning)
        config = tf.compat.v1.ConfigProto(device_count={"CPU": TOWERS})
        return tw_launch.start_local(ps=1, workers=WORKERS, config=config)


def in_all_workers(local: Any, work: Callable[[Any, str], Any]) -> list[Any]:
    """Runs ``work(task, target)`` in a thread a worker; their results."""

    def run(index: int) -> Any:
        return work(local.task("worker", index), local.target("worker", index))

    found = in_threads(run, range(WORKERS), DEADLINE_S)
    return [found[index] for index in range(WORKERS)]


def devices_of(task: Any) -> list[str]:
    return [f"/job:worker/task:{task.index}/cpu:{k}" for k in range(TOWERS)]
