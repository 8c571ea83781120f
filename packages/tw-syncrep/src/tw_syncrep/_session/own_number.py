"""Takes a replica's number without a session of this task.

A server ends a task's sessions when another process begins one under the same name: two
live processes with one index would keep ending each other's sessions. So a process
first takes its number, in a session of the table's own server, and begins no other
session if a later process has it.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tw_syncrep._errors import ReplicaReplacedError
from tw_syncrep._protocol.graph import SyncGraph
from tw_syncrep._protocol.run_table import (
    ReplicaField,
    draw_life,
    make_run_table,
    take_number,
)

_ANSWER_MS = 1500
_POLL_S = 0.25


class OwnNumber:
    """A replica's number, which belongs to its process for a life."""

    def __init__(self, graph: SyncGraph, address: str) -> None:
        """Takes the graph of the replica, and "host:port" of the table's server."""
        self._replica = graph.replica
        table = graph.state.table
        container, name = (
            table.handle.op.get_attr(attr).decode()
            for attr in ("container", "shared_name")
        )
        own = tf.Graph()
        with own.as_default(), own.container(container), tf.device(table.device):
            table = make_run_table(table.device, shared_name=name)
            self._life = tf.compat.v1.placeholder(tf.int64, [])
            self._drawn = draw_life(table, self._replica)
            self._latest = table.read_of(self._replica, ReplicaField.LIFE)[0]
            self._taken = take_number(table, self._replica, self._life)
        self._graph, self._address = own, address
        self._config = tf.compat.v1.ConfigProto(
            device_filters=[_task_of(table.device)], operation_timeout_in_ms=_ANSWER_MS
        )

    def _connect(self) -> Any:
        """Returns a session on the table's server."""
        return tf.compat.v1.Session(
            f"grpc://{self._address}", self._graph, self._config
        )

    def is_replaced(self, life: int) -> bool:
        """Returns whether a later process has the number; False without an answer."""
        try:
            with self._connect() as session:
                return bool(0 < life < int(session.run(self._latest)))
        except tf.errors.OpError:
            return False

    def take(self, life: int, *, check: Callable[[], None]) -> int:
        """Takes the number for a life, which it draws if that is 0; returns the life.

        In two calls, so that an op left behind by a dead process takes no number.
        ``check`` raises to end the wait for the server.
        """
        while True:
            check()
            try:
                with self._connect() as session:
                    life = life or int(session.run(self._drawn))
                    session.run(self._taken, {self._life: life})
                    latest = int(session.run(self._latest))
                break
            except tf.errors.OpError:  # The server does not answer, or restarts.
                time.sleep(_POLL_S)
        if life < latest:
            raise ReplicaReplacedError(self._replica)
        return life


def find_own_number(graph: SyncGraph, addresses: Mapping[str, Any]) -> OwnNumber | None:
    """Returns a replica's ``OwnNumber``; None where its server is not known."""
    device = tf.DeviceSpec.from_string(graph.state.table.device)
    servers = addresses.get("ps", ())
    if device.job != "ps" or device.task is None or device.task >= len(servers):
        return None
    return OwnNumber(graph, servers[device.task])


def _task_of(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    return f"/job:{spec.job}/task:{spec.task}"
