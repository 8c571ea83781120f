"""A cluster's servers, and the settings of servers and sessions."""

import contextlib
import ctypes
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_core.internal import check_flag, check_kind, check_whole_number
from tw_launch._addresses import hold_port, split_address, wait_for_port
from tw_launch._network_exposure import hold_free_ports, warn_if_exposed
from tw_launch._tf_config import TaskConfig, check_task

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_NEVER = 2**31 - 1
_HEAP_BYTES = 64 << 20
_PORT_S = 10.0


def cluster_spec(task: TaskConfig) -> tf.train.ClusterSpec:
    """Returns the cluster as a ``tf.train.ClusterSpec``.

    Raises:
      TypeError: ``task`` is not a ``TaskConfig``.
    """
    check_task(task)
    return tf.train.ClusterSpec({job: list(a) for job, a in task.addresses.items()})


def start_server(
    task: TaskConfig, *, config: Any = None, keep_memory: bool = True
) -> tf.distribute.Server:
    """Starts this task's server; the chief warns if other machines can reach it.

    Args:
      task: this process's task in a cluster.
      config: a ``ConfigProto``; by default, one that makes idle threads sleep at
        once if this machine has no more processors than tasks.
      keep_memory: whether this process keeps freed memory, which makes steps with
        megabytes of gradients faster.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: the task is an evaluator outside the cluster.
      OSError: something else is listening on its port, and still is after 10 s.
    """
    check_task(task)
    check_kind(
        tf.compat.v1.ConfigProto | None, "a tf.compat.v1.ConfigProto", config=config
    )
    check_flag(keep_memory=keep_memory)
    if task.address is None:
        raise ValueError(
            f"start_server: {task.job} {task.index} is not part of the cluster "
            f"{dict(task.addresses)}; it needs no server: evaluate checkpoints."
        )
    server = _start(task, task.address, config, keep_memory=keep_memory)
    if task.is_chief or not task.replicas:  # Every other task would repeat it.
        warn_if_exposed(split_address(task.address)[1], stacklevel=2)
    return server


def _start(
    task: TaskConfig, address: str, config: Any, *, keep_memory: bool = True
) -> tf.distribute.Server:
    port = split_address(address)[1]
    try:
        until_s = time.monotonic() + _PORT_S
        wait_for_port(lambda: hold_port(port), until_s=until_s).close()
    except OSError as error:
        raise OSError(
            error.errno,
            f"start_server: {task.job} {task.index} cannot listen at {address} "
            f"({error.strerror}); end the program there, or choose another port",
        ) from None
    if keep_memory:
        keep_freed_memory()
    if config is None:
        config = server_config(task.addresses, address)
    return tf.distribute.Server(
        cluster_spec(task), job_name=task.job, task_index=task.index, config=config
    )


def with_device_filters(config: Any, cluster: TaskConfig | None) -> Any:
    """Returns a session config with which a task sees only itself and the servers.

    A TensorFlow session contacts every task of the cluster that it may use, so
    without filters the death of one replica would affect all sessions.

    Args:
      config: a ``ConfigProto`` or None; one with filters is returned as it is.
      cluster: this task; with None, nothing is filtered.

    Raises:
      TypeError: an argument has the wrong type.
    """
    check_kind(
        tf.compat.v1.ConfigProto | None, "a tf.compat.v1.ConfigProto", config=config
    )
    if cluster is not None:
        check_task(cluster)
    if cluster is None or (config is not None and config.device_filters):
        return config
    filtered = tf.compat.v1.ConfigProto()
    if config is not None:
        filtered.CopyFrom(config)
    filtered.device_filters.extend(
        ["/job:ps", f"/job:{cluster.job}/task:{cluster.index}"]
    )
    return filtered


@dataclass(frozen=True)
class LocalCluster:
    """Servers in this process, for tests and first steps.

    Attributes:
      addresses: job to "localhost:port".
      servers: by (job, index); they run as long as this process.
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
        known = [f"{job} {i}" for job, i in _tasks_of(self.addresses)]
        if f"{job} {index}" not in known:
            raise ValueError(
                f"LocalCluster.{method}: there is no {job!r} {index!r}; known are "
                f"{', '.join(known)}."
            )


def start_local(*, ps: int = 1, workers: int = 2, config: Any = None) -> LocalCluster:
    """Starts a cluster's servers in this process, on free ports.

    Args:
      ps: number of parameter servers.
      workers: number of replicas; the first is the chief.
      config: a ``ConfigProto`` for every server; by default, as in ``start_server``.

    Raises:
      TypeError: a count is not a whole number, or ``config`` not a configuration.
      ValueError: a count is negative, or there is no worker.
    """
    check_whole_number(ps=ps)
    check_whole_number(workers=workers)
    check_kind(
        tf.compat.v1.ConfigProto | None, "a tf.compat.v1.ConfigProto", config=config
    )
    if ps < 0 or workers < 1:
        raise ValueError(
            f"start_local: needs ps >= 0 and workers >= 1; got {ps} and {workers}."
        )
    counts = {"ps": ps, "worker": workers}
    with contextlib.ExitStack() as stack:
        held = hold_free_ports(ps + workers)
        for one in held.values():
            stack.enter_context(one)
        ports = iter(held)
        addresses = {
            job: tuple(f"localhost:{next(ports)}" for _ in range(count))
            for job, count in counts.items()
            if count
        }
        servers = {
            (job, i): _start(TaskConfig(addresses, job, i), addresses[job][i], config)
            for job, i in _tasks_of(addresses)
        }
    for port in held:
        warn_if_exposed(port, stacklevel=2)
    return LocalCluster(addresses, servers)


def server_config(
    addresses: Mapping[str, Sequence[str]], own: str
) -> tf.compat.v1.ConfigProto:
    """Returns the default settings of a server.

    TensorFlow's idle threads spin for a while before they sleep, so that the next op
    starts at once. On a machine with no more processors than tasks, spinning takes
    processor time from another task.
    """
    processors = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # those that this process may use
        processors = len(os.sched_getaffinity(0))
    config = tf.compat.v1.ConfigProto()
    if shares_processors(addresses, own, processors=processors):
        config.experimental.disable_thread_spinning = True
    return config


def shares_processors(
    addresses: Mapping[str, Sequence[str]], own: str, *, processors: int
) -> bool:
    """Returns whether ``own``'s machine has several tasks and no processor to spare."""
    host = own.rpartition(":")[0]
    listed = [address for tasks in addresses.values() for address in tasks]
    tasks = sum(address.rpartition(":")[0] == host for address in listed)
    return tasks > 1 and tasks >= processors


def keep_freed_memory() -> bool:
    """Makes the C library keep freed memory; returns whether it does (only glibc).

    The packs of a step are megabytes that are allocated, sent and freed. By default,
    the C library returns such memory to the system, and touching it again, a page at
    a time, can take twenty times as long as copying into memory that was kept. The
    setting applies to the whole process, whose memory then never shrinks.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = (
        (_M_TRIM_THRESHOLD, _NEVER),
        (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        # A thread's heap that is entirely free is returned unless this is as large.
        (_M_TOP_PAD, _HEAP_BYTES),
    )
    return all(mallopt(name, value) for name, value in settings)


def _tasks_of(addresses: Mapping[str, Sequence[str]]) -> list[tuple[str, int]]:
    return [(job, i) for job, listed in addresses.items() for i in range(len(listed))]
