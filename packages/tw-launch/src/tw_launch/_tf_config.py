"""TF_CONFIG: the tasks of a cluster, and which of them this process is.

It is the environment variable that TensorFlow's own distribution code, Kubeflow
and other engines use: JSON with ``cluster`` (job to addresses) and ``task``
(``type`` and ``index``).
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tw_core.internal import check_text, check_whole_number
from tw_launch._addresses import split_address

JOBS = ("chief", "worker", "ps", "evaluator")
_OLD_NAMES = {"master": "chief"}
_SPARSE = "sparseCluster"  # Kubeflow's: it lists a worker with the servers only.


@dataclass(frozen=True)
class TaskConfig:
    """A cluster and one of its tasks.

    Attributes:
      addresses: job to "host:port" strings, in the order of the tasks.
      job: this task's job.
      index: this task's index within its job.
    """

    addresses: Mapping[str, tuple[str, ...]]
    job: str
    index: int

    def __post_init__(self) -> None:
        """Checks that this is a task of a cluster.

        Raises:
          TypeError: an attribute has the wrong type.
          ValueError: the addresses or the task are wrong; every fault is named.
        """
        check_text(job=self.job)
        check_whole_number(index=self.index)
        if not _are_addresses(self.addresses):
            raise TypeError(
                "TaskConfig: addresses must map jobs to lists of 'host:port'; got "
                f"{self.addresses!r}."
            )
        task = {"type": self.job, "index": int(self.index)}
        faults = _faults_of_cluster(self.addresses)
        faults += _faults_of_task(task, self.addresses)
        if faults:
            raise ValueError(f"TaskConfig: {'; '.join(faults)}.")

    @property
    def replicas(self) -> tuple[tuple[str, int], ...]:
        """The (job, index) of every replica, in order: the chief, then workers."""
        return tuple(
            (job, index)
            for job in ("chief", "worker")
            for index in range(len(self.addresses.get(job, ())))
        )

    @property
    def replica_index(self) -> int | None:
        """This task's number among the replicas; None for other tasks."""
        own = (self.job, self.index)
        return self.replicas.index(own) if own in self.replicas else None

    @property
    def is_chief(self) -> bool:
        """Whether this task is the first replica."""
        return self.replica_index == 0

    @property
    def address(self) -> str | None:
        """The address of this task's server; None for an evaluator outside."""
        listed = self.addresses.get(self.job, ())
        return listed[self.index] if self.index < len(listed) else None

    @property
    def device(self) -> str:
        """This task's device name, without a processor."""
        return f"/job:{self.job}/replica:0/task:{self.index}"


def read_tf_config(text: str | None = None) -> TaskConfig:
    """Reads and checks TF_CONFIG.

    Args:
      text: JSON; by default, the value of the environment variable.

    Returns:
      The cluster and this process's task.

    Raises:
      TypeError: ``text`` is not a string.
      ValueError: it is missing, not JSON, or wrong; every fault is named.
    """
    if text is not None:
        check_text(text=text, empty=True)
    if text is None:
        text = os.environ.get("TF_CONFIG")
    if not text:
        raise ValueError(
            "read_tf_config: TF_CONFIG is not set; start the program with "
            "`tw-launch --ps 1 --workers 2 -- python train.py`, or set it to JSON like "
            '{"cluster": {"ps": ["host:port"], "worker": ["host:port"]}, '
            '"task": {"type": "worker", "index": 0}}.'
        )
    config = _parse(text)
    cluster, task = config.get("cluster", {}), config.get("task", {})
    if cluster == {} and (task or _SPARSE in config):
        raise ValueError(_describe_missing_cluster(config))
    if not _are_addresses(cluster):
        raise ValueError(
            "read_tf_config: 'cluster' must map jobs to lists of 'host:port'; got "
            f"{cluster!r}."
        )
    addresses = {_job_name(job): tuple(own) for job, own in cluster.items() if own}
    faults = _faults_of_cluster(addresses) + _faults_of_task(task, addresses)
    if faults:
        raise ValueError("read_tf_config: TF_CONFIG is wrong: " + "; ".join(faults))
    return TaskConfig(addresses, _job_name(task["type"]), int(task["index"]))


def find_tf_config() -> TaskConfig | None:
    """Reads TF_CONFIG; returns None if it is not set, or has no task and no cluster.

    A task without a cluster is one of several, and must not train alone.
    """
    text = os.environ.get("TF_CONFIG")
    if not text:
        return None
    config = _parse(text)
    is_empty = config.get("cluster") in (None, {}) and not config.get("task")
    return None if is_empty and _SPARSE not in config else read_tf_config(text)


def check_task(task: Any) -> None:
    """Refuses anything but a ``TaskConfig``."""
    if not isinstance(task, TaskConfig):
        raise TypeError(
            "task must be a tw_launch.TaskConfig, as cluster.read_tf_config() returns; "
            f"got {task!r}."
        )


def _describe_missing_cluster(config: Mapping[str, Any]) -> str:
    instead = "set TF_CONFIG's 'cluster', or unset TF_CONFIG if the process is alone"
    if _SPARSE in config:
        instead = (
            f"its {_SPARSE!r} does not list the other workers; set "
            "enableDynamicWorker: false in the TFJob"
        )
    return (
        "read_tf_config: TF_CONFIG must have a 'cluster' that lists every task; got "
        f"only the task {config.get('task')!r}: {instead}."
    )


def _parse(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"read_tf_config: TF_CONFIG is not JSON ({error}); got {text!r}."
        ) from None
    if not isinstance(config, dict):
        raise ValueError(
            "read_tf_config: TF_CONFIG must be a JSON object with 'cluster' and "
            f"'task'; got {text!r}."
        )
    return config


def _are_addresses(cluster: Any) -> bool:
    return isinstance(cluster, Mapping) and all(
        isinstance(tasks, list | tuple) and all(isinstance(a, str) for a in tasks)
        for tasks in cluster.values()
    )


def _job_name(job: Any) -> Any:
    return _OLD_NAMES.get(job, job) if isinstance(job, str) else job


def _faults_of_cluster(addresses: Mapping[str, tuple[str, ...]]) -> list[str]:
    faults = [
        f"job {job!r} is unknown; known are {', '.join(JOBS)}"
        for job in addresses
        if job not in JOBS
    ]
    owners: dict[str, list[str]] = {}
    for job, tasks in addresses.items():
        for index, address in enumerate(tasks):
            owners.setdefault(address, []).append(f"{job} {index}")
            if not _is_address(address):
                faults.append(f"{job} {index} has {address!r}, which is not host:port")
    for address, tasks_there in owners.items():
        if len(tasks_there) > 1:
            faults.append(f"{address} is given to {' and '.join(tasks_there)}")
    if len(addresses.get("chief", ())) > 1:
        faults.append(f"only one chief is allowed; got {len(addresses['chief'])}")
    if not addresses.get("chief") and not addresses.get("worker"):
        faults.append("there is neither a chief nor a worker")
    return faults


def _is_address(address: str) -> bool:
    try:
        split_address(address)
    except ValueError:
        return False
    return True


def _faults_of_task(task: Any, addresses: Mapping[str, tuple[str, ...]]) -> list[str]:
    if not isinstance(task, dict) or {"type", "index"} - task.keys():
        return [f"'task' must have 'type' and 'index'; got {task!r}"]
    job, index = _job_name(task["type"]), task["index"]
    if job not in JOBS:
        return [f"task type {job!r} is unknown; known are {', '.join(JOBS)}"]
    if isinstance(index, bool) or not str(index).isdecimal():
        return [f"task index must be 0 or more; got {index!r}"]
    count = len(addresses.get(job, ()))
    if job == "evaluator" and not count:  # need not be part of the cluster
        return []
    if int(index) >= count:
        return [f"task is {job} {index}, but the cluster has {count} of {job}"]
    return []
