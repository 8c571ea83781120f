"""The board: a table of numbers on a parameter server that all replicas read.

It says where the run stands (round, epoch), who has arrived, and when each was
last heard. It is a hash table and no variable, so that nothing needs to be
initialised, nothing gets into a checkpoint, and a replica that starts late
changes only its own rows. Its clock is the server's.

A *round* is one step of the optimizer. An *epoch* begins when a chief starts or
restores: what a replica computed in an older one is not accepted. A *run* has
epochs until it is closed; who has joined or left it is marked with its number, as
the servers may live on and see another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import tensorflow as tf

from tw_syncrep._exact_device_scope import on_device

RING = 64


class Field(IntEnum):
    """Rows about the run.

    STEP is the global step after the last round; FIRST_ROUND and FIRST_STEP are the
    round and the global step with which the epoch began.
    """

    ROUND = 0
    EPOCH = 1
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
    ``mark`` of the run that it left or joined last. ARRIVALS counts its gradients
    of the round and epoch that it arrived in last, INITIAL its initial tokens.
    """

    HEARD = 0
    ARRIVED_ROUND = 1
    ARRIVED_AT = 2
    LEFT = 3
    JOINED = 4
    ARRIVED_EPOCH = 5
    ARRIVALS = 6
    INITIAL = 7


_RING_BASE = 16
_REPLICA_BASE = _RING_BASE + RING
_ROWS_PER_REPLICA = 8


def mark(run: Any) -> Any:
    """Returns what marks a replica in a run; never 0, as nothing written is."""
    return run + 1


def replica_key(replica: int, field: ReplicaField) -> int:
    """Returns the row of one replica's field."""
    return _REPLICA_BASE + _ROWS_PER_REPLICA * replica + field


def replica_keys(replicas: int, field: ReplicaField) -> list[int]:
    """Returns the rows of a field for replicas 0 to ``replicas`` - 1."""
    return [replica_key(replica, field) for replica in range(replicas)]


def ring_keys() -> list[int]:
    """Returns the rows that hold when the last rounds ended."""
    return [_RING_BASE + place for place in range(RING)]


def ring_key(round_number: tf.Tensor) -> tf.Tensor:
    """Returns the row for the end of a round, int64 []."""
    return _RING_BASE + round_number % RING


@dataclass(frozen=True)
class Board:
    """The table of one optimizer.

    Attributes:
      handle: resource, on the server.
      device: the server.
    """

    handle: tf.Tensor
    device: str

    def read(self, keys: Sequence[int]) -> tf.Tensor:
        """Reads rows, int64 [len(keys)]; 0 where nothing was written."""
        with on_device(self.device):
            return tf.raw_ops.LookupTableFindV2(
                table_handle=self.handle,
                keys=tf.constant(keys, tf.int64),
                default_value=tf.constant(0, tf.int64),
            )

    def write(self, rows: Mapping[int, Any] | Sequence[tuple[Any, Any]]) -> Any:
        """Returns the op that writes rows: keys and values are int64 []."""
        pairs = list(rows.items()) if isinstance(rows, Mapping) else list(rows)
        with on_device(self.device):
            return tf.raw_ops.LookupTableInsertV2(
                table_handle=self.handle,
                keys=tf.stack([tf.cast(key, tf.int64) for key, _ in pairs]),
                values=tf.stack([tf.cast(value, tf.int64) for _, value in pairs]),
            )

    def now(self) -> tf.Tensor:
        """Returns the server's time in microseconds, int64 []."""
        with on_device(self.device):
            return tf.cast(tf.timestamp() * 1e6, tf.int64)


def make_board(device: str, *, shared_name: str) -> Board:
    """Makes the handle of the board that all processes share by its name."""
    with on_device(device):
        handle = tf.raw_ops.MutableHashTableV2(
            key_dtype=tf.int64,
            value_dtype=tf.int64,
            container="",
            shared_name=shared_name,
            use_node_name_sharing=False,
        )
    return Board(handle, device)
