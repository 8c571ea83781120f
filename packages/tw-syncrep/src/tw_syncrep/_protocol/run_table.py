"""The run table: numbers on a parameter server that say how the run stands.

It holds the round and incarnation that are in progress, who has arrived, and when
each replica was last heard from. It is a hash table and not a variable, so that
nothing needs to be initialized, nothing gets into a checkpoint, and a replica that
starts late changes its own rows only. Its clock is the server's.

A *round* is one step of the optimizer. An *incarnation* begins when a chief starts or
restores: what a replica computed in an older one is not accepted. A *run* has
incarnations until it is closed; whoever has joined or left it is marked with its
number, since the servers may outlive it and see another.

A *ticket* says which replica computed a gradient, and for which round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import tensorflow as tf

RING = 64
"""The table remembers when this many rounds ended."""


class RunField(IntEnum):
    """Rows about the run.

    STEP is the global step after the last round; FIRST_ROUND and FIRST_STEP are the
    round and the global step with which the incarnation began.
    """

    ROUND = 0
    INCARNATION = 1
    CLOSED = 2
    DROPPED = 3
    CHIEF = 4
    FIRST_ROUND = 5
    RUN = 6
    STEP = 7
    FIRST_STEP = 8


class ReplicaField(IntEnum):
    """Rows about one replica.

    Times are in microseconds of the server's clock; LEFT and JOINED hold the
    ``run_mark`` of the run that it left or joined last. ARRIVALS counts its gradients
    of the round and incarnation that it arrived in last, INITIAL its initial tokens.
    """

    HEARD = 0
    ARRIVED_ROUND = 1
    ARRIVED_AT = 2
    LEFT = 3
    JOINED = 4
    ARRIVED_INCARNATION = 5
    ARRIVALS = 6
    INITIAL = 7


_RING_BASE = 16
_REPLICA_BASE = _RING_BASE + RING
_ROWS_PER_REPLICA = 8


def run_mark(run: Any) -> Any:
    """Returns what marks a replica in a run; never 0, which means nothing written."""
    return run + 1


def replica_key(replica: int, field: ReplicaField) -> int:
    """Returns the key of one replica's field."""
    return _REPLICA_BASE + _ROWS_PER_REPLICA * replica + field


def replica_keys(replicas: int, field: ReplicaField) -> list[int]:
    """Returns the keys of a field for replicas 0 to ``replicas`` - 1."""
    return [replica_key(replica, field) for replica in range(replicas)]


def ring_keys() -> list[int]:
    """Returns the keys of the times at which the last rounds ended."""
    return [_RING_BASE + place for place in range(RING)]


def ring_key(round_number: tf.Tensor) -> tf.Tensor:
    """Returns the key of the time at which a round ended, int64 []."""
    return _RING_BASE + round_number % RING


@dataclass(frozen=True)
class RunTable:
    """The table of one optimizer.

    Its methods build their ops on the current device: enter
    ``exact_device_scope(table.device)`` around them.

    Attributes:
      handle: resource, on the server.
      device: the server.
    """

    handle: tf.Tensor
    device: str

    def read(self, keys: Sequence[int]) -> tf.Tensor:
        """Reads rows, int64 [len(keys)]; 0 where nothing was written."""
        return tf.raw_ops.LookupTableFindV2(
            table_handle=self.handle,
            keys=tf.constant(keys, tf.int64),
            default_value=tf.constant(0, tf.int64),
        )

    def write(self, rows: Mapping[Any, Any] | Sequence[tuple[Any, Any]]) -> Any:
        """Returns the op that writes rows: keys and values are int64 []."""
        pairs = list(rows.items()) if isinstance(rows, Mapping) else list(rows)
        return tf.raw_ops.LookupTableInsertV2(
            table_handle=self.handle,
            keys=tf.stack([tf.cast(key, tf.int64) for key, _ in pairs]),
            values=tf.stack([tf.cast(value, tf.int64) for _, value in pairs]),
        )

    def now(self) -> tf.Tensor:
        """Returns the server's time in microseconds, int64 []."""
        return tf.cast(tf.timestamp() * 1e6, tf.int64)


def make_run_table(device: str, *, shared_name: str) -> RunTable:
    """Makes the handle of the table that all processes share by its name.

    Args:
      device: the server; to be called in ``detached_scope``.
      shared_name: the table's name on the server.
    """
    with tf.device(device):
        handle = tf.raw_ops.MutableHashTableV2(
            key_dtype=tf.int64,
            value_dtype=tf.int64,
            container="",
            shared_name=shared_name,
            use_node_name_sharing=False,
        )
    return RunTable(handle, device)


TICKET_SIZE = 4
NOTICE = -1
"""Round of a ticket that carries no gradient: the chief is to read the table again."""


def make_ticket(replica: int, position: tf.Tensor) -> tf.Tensor:
    """Makes a ticket on the worker.

    Args:
      replica: number of the replica.
      position: int64 [2], round and incarnation for which it computed.

    Returns:
      int64 [TICKET_SIZE]: replica, round, incarnation, and the worker's time, which
      tells apart two pushes of one replica in one round, as by a restarted worker.
    """
    own = tf.constant([replica], tf.int64)
    stamp = tf.bitcast(tf.reshape(tf.timestamp(), [1]), tf.int64)
    return tf.concat([own, position, stamp], axis=0)


def make_notice(replica: int) -> tf.Tensor:
    """Makes a ticket that only wakes the chief."""
    return tf.constant([replica, NOTICE, NOTICE, NOTICE], tf.int64)
