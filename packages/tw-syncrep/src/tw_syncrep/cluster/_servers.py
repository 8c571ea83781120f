"""A cluster's servers and devices, and a getter of parameters pulled in packs."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_core import replica_device_setter
from tw_core.checks import check_flag, check_whole_number
from tw_syncrep._call_checks import check_config, check_task
from tw_syncrep._transfer.parameter_cache import SMALL, mirrors
from tw_syncrep._transfer.parameter_cache import variable_getter as _variable_getter
from tw_syncrep.cluster._device_filters import with_device_filters
from tw_syncrep.cluster._malloc import keep_freed_memory
from tw_syncrep.cluster._network_exposure import (
    ExposedServerWarning,
    is_exposed,
    warn_if_exposed,
)
from tw_syncrep.cluster._ports import find_free_ports
from tw_syncrep.cluster._server_threads import server_config
from tw_syncrep.cluster._tf_config import TaskConfig, find_tf_config, read_tf_config

__all__ = [
    "ExposedServerWarning",
    "LocalCluster",
    "TaskConfig",
    "cluster_spec",
    "device_setter",
    "find_tf_config",
    "is_exposed",
    "mirrors",
    "pulled_together",
    "read_tf_config",
    "start_local",
    "start_server",
    "variable_getter",
    "with_device_filters",
]


def cluster_spec(task: TaskConfig) -> tf.train.ClusterSpec:
    """Returns the cluster as TensorFlow takes it.

    Raises:
      TypeError: ``task`` describes none.
    """
    check_task("cluster_spec", task)
    return tf.train.ClusterSpec({job: list(a) for job, a in task.addresses.items()})


def start_server(
    task: TaskConfig, *, config: Any = None, keep_memory: bool = True
) -> tf.distribute.Server:
    """Starts this task's server, and warns where it is open to other machines.

    Args:
      task: of a cluster.
      config: a ``ConfigProto``; by default one with which idle threads sleep at
        once where this machine has no more processors than tasks.
      keep_memory: whether this process keeps memory that it freed, which makes
        steps with megabytes of gradients faster.

    Raises:
      TypeError: an argument is of another type.
      ValueError: the task is an evaluator outside of the cluster.
    """
    check_task("start_server", task)
    check_config("start_server", config)
    check_flag("start_server", keep_memory=keep_memory)
    if task.address is None:
        raise ValueError(
            f"start_server: {task.job} {task.index} is no part of the cluster "
            f"{dict(task.addresses)}; it needs no server: evaluate checkpoints."
        )
    if keep_memory:
        keep_freed_memory()
    if config is None:
        config = server_config(task.addresses, task.address)
    server = tf.distribute.Server(
        cluster_spec(task), job_name=task.job, task_index=task.index, config=config
    )
    warn_if_exposed(int(task.address.rpartition(":")[2]))
    return server


def device_setter(task: TaskConfig) -> Callable[[tf.Operation], str] | None:
    """Returns a device function: variables on the servers, the rest on this task.

    For ``tf.compat.v1.device``; None where the cluster has no parameter server.

    Raises:
      TypeError: ``task`` describes none.
    """
    check_task("device_setter", task)
    return replica_device_setter(
        worker_device=f"/job:{task.job}/task:{task.index}", cluster=cluster_spec(task)
    )


def variable_getter(
    task: TaskConfig | str, *, below: int = SMALL
) -> Callable[..., tf.Variable]:
    """Makes a getter under which parameters are pulled in packs.

    Under it, ``get_variable`` returns a copy of a trainable parameter on the
    worker; the training op of ``SyncReplicasOptimizer`` renews all copies with
    one transfer a server and dtype. Checkpoints hold the parameters, not the
    copies. To differentiate by hand, use what ``get_variable`` returned.

    Args:
      task: this task, or its device.
      below: bytes; larger parameters are read where they are.

    Returns:
      A function for ``tf.compat.v1.variable_scope(custom_getter=...)``.

    Raises:
      TypeError: ``task`` describes none, or ``below`` is no whole number.
      ValueError: ``task`` is no device string, or ``below`` negative.
    """
    return _make_getter("variable_getter", task, below)


@contextlib.contextmanager
def pulled_together(task: TaskConfig | str, *, below: int = SMALL) -> Iterator[None]:
    """Has the variables of a model pulled in packs; see ``variable_getter``."""
    getter = _make_getter("pulled_together", task, below)
    scope = tf.compat.v1.get_variable_scope()
    with tf.compat.v1.variable_scope(scope, custom_getter=getter):
        yield


def _make_getter(
    caller: str, task: TaskConfig | str, below: int
) -> Callable[..., tf.Variable]:
    below = check_whole_number(caller, below=below, at_least=0)
    if not isinstance(task, str):
        check_task(caller, task)
        return _variable_getter(f"/job:{task.job}/task:{task.index}", below=below)
    try:
        tf.DeviceSpec.from_string(task)
    except ValueError as error:
        raise ValueError(
            f"{caller}: task {task!r} is no device string such as '/job:worker/task:1'."
        ) from error
    return _variable_getter(task, below=below)


@dataclass(frozen=True)
class LocalCluster:
    """Servers in this process, for tests and first steps.

    Attributes:
      addresses: job to "localhost:port".
      servers: by (job, index); they live as long as this process.
    """

    addresses: dict[str, tuple[str, ...]]
    servers: dict[tuple[str, int], tf.distribute.Server]

    def task(self, job: str, index: int) -> TaskConfig:
        """Returns the description of one task.

        Raises:
          ValueError: there is no such task.
        """
        self._check_task("task", job, index)
        return TaskConfig(self.addresses, job, index)

    def target(self, job: str, index: int) -> str:
        """Returns the target for a task's sessions.

        Raises:
          ValueError: there is no such task.
        """
        self._check_task("target", job, index)
        return str(self.servers[job, index].target)

    def _check_task(self, method: str, job: str, index: int) -> None:
        known = [
            f"{job} {i}"
            for job, tasks in self.addresses.items()
            for i in range(len(tasks))
        ]
        if f"{job} {index}" not in known:
            raise ValueError(
                f"LocalCluster.{method}: there is no {job!r} {index!r}; known are "
                f"{', '.join(known)}."
            )


def start_local(*, ps: int = 1, workers: int = 2, config: Any = None) -> LocalCluster:
    """Starts a cluster's servers in this process, on free ports.

    Args:
      ps: parameter servers.
      workers: replicas; the first is the chief.
      config: a ``ConfigProto`` for every server; by default ``start_server``'s.

    Raises:
      TypeError: a count is no whole number, or ``config`` no configuration.
      ValueError: a count is negative, or there is no worker.
    """
    check_whole_number("start_local", ps=ps)
    check_whole_number("start_local", workers=workers)
    check_config("start_local", config)
    if ps < 0 or workers < 1:
        raise ValueError(
            f"start_local: needs ps >= 0 and workers >= 1; got {ps} and {workers}."
        )
    counts = {"ps": ps, "worker": workers}
    ports = iter(find_free_ports(ps + workers))
    addresses = {
        job: tuple(f"localhost:{next(ports)}" for _ in range(count))
        for job, count in counts.items()
        if count
    }
    tasks = [(job, i) for job, listed in addresses.items() for i in range(len(listed))]
    servers = {
        (job, i): start_server(TaskConfig(addresses, job, i), config=config)
        for job, i in tasks
    }
    return LocalCluster(addresses, servers)
