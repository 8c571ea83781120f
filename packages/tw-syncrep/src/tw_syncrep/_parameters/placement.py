"""Placement of variables on parameter servers.

Every task of a cluster builds the graph for itself, and all must place a variable on
the same server: its place depends only on the variables made before it. Scopes of
replicas' own state override the caller's instead of merging with them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Literal, TypeAlias

import tensorflow as tf

from tw_core import replica_device_setter
from tw_core.devices import LeastLoadedTask
from tw_core.internal import check_list, check_number
from tw_launch import TaskConfig, cluster_spec
from tw_launch.internal import check_task

_Strategy: TypeAlias = Callable[[tf.Operation], int]
_CALLER = "device_setter"
_NAMED = ("bytes", "round_robin")


def device_setter(
    task: TaskConfig,
    *,
    strategy: Literal["bytes", "round_robin"] | Callable[[tf.Operation], int] = "bytes",
    capacities: Sequence[float] | None = None,
) -> Callable[[tf.Operation], str] | None:
    """Returns a device function: variables on the servers, the rest on this task.

    For ``tf.compat.v1.device``; None where the cluster has no parameter server. All
    tasks of a cluster must make the same variables in the same order, and pass the same
    arguments here; a checkpoint restores under any arguments.

    Args:
      task: this task and its cluster.
      strategy: "bytes" puts each variable on the server with the fewest bytes so far,
        an unknown dimension counting as 1; "round_robin" on the servers in turn, as
        TensorFlow does. A function takes the op of a variable or table and returns the
        index of a server.
      capacities: [servers] relative capacities: with (1, 2), the second server gets
        twice as many bytes. By default, all are equal.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: ``strategy`` is unknown, or ``capacities`` are not one number above 0
        for each server, or are given with a strategy other than "bytes". The device
        function raises it if ``strategy`` does not return the index of a server.
    """
    check_task(task)
    return replica_device_setter(
        worker_device=f"/job:{task.job}/task:{task.index}",
        cluster=cluster_spec(task),
        ps_strategy=_make_strategy(
            strategy, capacities, servers=len(task.addresses.get("ps", ()))
        ),
    )


def _make_strategy(
    strategy: str | _Strategy, capacities: Sequence[float] | None, *, servers: int
) -> _Strategy | None:
    """Returns a ``ps_strategy`` for ``replica_device_setter``; None for its default."""
    is_named = isinstance(strategy, str)
    if not callable(strategy) and not (is_named and strategy in _NAMED):
        raise (ValueError if is_named else TypeError)(
            f"{_CALLER}: strategy must be 'bytes', 'round_robin' or a function from an "
            f"op to a server's index; got {strategy!r}."
        )
    if capacities is not None:
        if strategy != "bytes":
            raise ValueError(
                f"{_CALLER}: capacities are for strategy='bytes'; got {capacities!r} "
                f"with {strategy!r}."
            )
        listed = check_list(capacities=capacities, of="numbers", empty=True)
        if len(listed) != servers:
            raise ValueError(
                f"{_CALLER}: capacities must have one number for each parameter "
                f"server; got {len(listed)} for {servers}."
            )
        capacities = [check_number(capacities=size, above=0) for size in listed]
    if callable(strategy):
        return _refuse_others(strategy, servers)
    if strategy == "round_robin" or not servers:
        return None
    return _fewest_bytes(capacities or [1.0] * servers)


def _fewest_bytes(capacities: Sequence[float]) -> _Strategy:
    """Returns a strategy that picks the server with the fewest bytes per capacity.

    The new variable's bytes are included: otherwise, a large first variable would go to
    the first server, however small its capacity.
    """
    loads = LeastLoadedTask(len(capacities))

    def choose(op: tf.Operation) -> int:
        more = _bytes_of(op)
        # Read before ``loads`` notes the op, which counts once it has a device.
        before = loads.bytes_on
        loads(op)
        full = [
            (has + more) / size for has, size in zip(before, capacities, strict=True)
        ]
        return full.index(min(full))

    return choose


def _bytes_of(op: tf.Operation) -> int:
    """Counts a variable's bytes as ``LeastLoadedTask`` does; 0 for other ops."""
    if op.type != "VarHandleOp":
        return 0
    count = int(tf.as_dtype(op.get_attr("dtype")).size)
    shape = tf.TensorShape(op.get_attr("shape"))
    for size in shape.as_list() if shape.rank else []:
        count *= 1 if size is None else size
    return count


def _refuse_others(strategy: _Strategy, servers: int) -> _Strategy:
    """Wraps ``strategy`` to refuse anything but the index of a server."""

    def choose(op: tf.Operation) -> int:
        server = strategy(op)
        is_whole = isinstance(server, Integral) and not isinstance(server, bool)
        if not is_whole or not 0 <= server < servers:
            raise ValueError(
                f"{_CALLER}: strategy must return a server's index, 0 to "
                f"{servers - 1}; got {server!r} for {op.name!r}."
            )
        return int(server)

    return choose


@contextmanager
def exact_device_scope(device: str) -> Iterator[None]:
    """Places ops on ``device`` alone, regardless of the caller's device scope.

    A worker's device function would otherwise complete the name of a parameter
    server with, say, the worker's GPU. An empty name leaves the choice to the
    session.
    """
    with tf.device(None), tf.device(device):
        yield


@contextmanager
def detached_scope() -> Iterator[None]:
    """Builds ops that inherit neither the device nor the control inputs of the caller.

    The chief's ops must not depend on the control inputs of the caller's training
    op, such as the ops of ``UPDATE_OPS``: these would run a second time.
    """
    with tf.control_dependencies(None), tf.device(None):
        yield
