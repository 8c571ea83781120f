"""TensorFlow's private modules, wrapped; no other module imports these."""

import functools
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context

_E = TypeVar("_E", bound=Exception)


def has_started() -> bool:
    """Returns whether this process's eager runtime has been initialized."""
    known = context.context_safe()
    return known is not None and bool(known._initialized)


def number_tasks(size: int) -> range:
    """Returns the number of each rank's task.

    TensorFlow orders a group by the names of its tasks, as strings: task 10 before
    task 2. Where that differs from the order of ranks, all numbers have one length:
    of 12 ranks, rank 2 is task 102.
    """
    first = 0 if size <= 10 else 10 ** len(str(size - 1))
    return range(first, first + size)


def join_cluster(addresses: Sequence[str], rank: int, *, sleep_at_once: bool) -> None:
    """Makes the eager runtime start as a task of a cluster, for collectives.

    Until it starts, with its first op or ``start_runtime``, it accepts settings. With
    ``sleep_at_once`` its idle threads sleep instead of spinning.
    """
    runtime, tasks = context.context(), number_tasks(len(addresses))
    runtime.configure_collective_ops(
        collective_leader=f"/job:worker/replica:0/task:{tasks[0]}",
        scoped_allocator_enabled_ops=(),
    )
    definition = tensorflow_server_pb2.ServerDef(
        job_name="worker", task_index=tasks[rank], protocol="grpc"
    )
    job = definition.cluster.job.add(name="worker")
    for task, address in zip(tasks, addresses, strict=True):
        job.tasks[task] = address
    runtime.enable_collective_ops(_Cluster(definition, sleep_at_once))
    # A child that is forked before the runtime starts would start this server, too.
    forget = functools.partial(setattr, runtime, "_collective_ops_server_def", None)
    os.register_at_fork(after_in_child=forget)


class _Cluster:
    """A server's definition, completed when TensorFlow reads it as the runtime starts.

    The server recreates the devices and threads. Without the runtime's settings there
    would be one CPU device, and each process would take every GPU.
    """

    def __init__(self, definition: Any, sleep_at_once: bool) -> None:
        self._definition, self._sleep_at_once = definition, sleep_at_once

    def __getattr__(self, name: str) -> Any:
        return getattr(self._definition, name)

    def SerializeToString(self) -> bytes:
        settings = context.context().config
        settings.experimental.disable_thread_spinning = self._sleep_at_once
        self._definition.default_session_config.CopyFrom(settings)
        return bytes(self._definition.SerializeToString())


def sleep_at_once() -> None:
    """Makes idle threads of the eager runtime, unless it runs, sleep, not spin."""
    runtime = context.context()
    if not has_started():
        settings = tf.compat.v1.ConfigProto()
        if runtime._config is not None:
            settings.CopyFrom(runtime._config)
        settings.experimental.disable_thread_spinning = True
        runtime._config = settings


def start_runtime() -> None:
    """Starts the eager runtime, unless it is running."""
    context.context().ensure_initialized()


def abort_collectives(message: str) -> None:
    """Aborts this process's collectives, running and future ones, with an error."""
    if has_started():  # Otherwise the agreement before the first one raises.
        context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def kept_by_autograph(error: _E) -> _E:
    """Makes AutoGraph raise an error as it is, not as a ``StagingError``."""
    error.ag_pass_through = True  # type: ignore[attr-defined]
    return error


def as_array(tensor: tf.Tensor) -> np.ndarray:
    """Returns an eager tensor's memory on the CPU; its ``numpy`` would copy it."""
    array: np.ndarray = tensor._numpy()
    return array


def eager_mode() -> AbstractContextManager[None]:
    """Returns a scope in which this thread runs eagerly, whatever the default is."""
    scope: AbstractContextManager[None] = context.eager_mode()
    return scope
