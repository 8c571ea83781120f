"""The run table: numbers on a parameter server that describe the state of the run.

It holds the round and incarnation that are in progress, which replicas have arrived,
and when each was last heard from. It is a hash table and not a variable, so that
nothing needs to be initialized, nothing gets into a checkpoint, and a replica that
starts late changes only its own rows. Its clock is the server's, which may be set back
or forward: numbers that must grow are drawn ``above`` the last, and each process times
its own waits (``timeouts/steady_times.py``).

A *round* is one step of the optimizer. An *incarnation* begins when a chief starts or
restores: gradients computed in an older one are not accepted. A *run* has incarnations
until it is closed; replicas that have joined or left it are marked with its number,
since the servers may outlive it and serve another. A *session* begins when a replica
joins: only its latest one may go on. A process draws a *life* before it joins for the
first time: a replica's number belongs to the latest life.

A *ticket* identifies the replica that computed a gradient, the batch and the round, and
holds its weight in the mean. A batch is identified by its *stamp*, which grows with
every batch of a replica.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import tensorflow as tf

from tw_core.internal import scalar_of

RING = 64
"""The table keeps the end times of this many rounds."""


class RunField(IntEnum):
    """Rows about the run.

    STEP is the global step after the last round; FIRST_ROUND and FIRST_STEP are the
    round and the global step with which the incarnation began. INCARNATION is negative
    while a chief initializes or restores the variables, before it begins one. CHANGING
    is 1 more than the round whose means are being applied, else 0; CUT_OFF counts
    rounds whose chief was lost at that time. HELD is the number of the last hold
    that began, DRAWN that of the last hold or release requested. EVICTED counts
    evictions of replicas. BEGUN_AT is the time at which the incarnation began.
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
    CHANGING = 9
    CUT_OFF = 10
    HELD = 11
    EVICTED = 12
    DRAWN = 13
    BEGUN_AT = 14


class ReplicaField(IntEnum):
    """Rows about one replica.

    Times are in microseconds of the server's clock; LEFT and JOINED hold the
    ``run_mark`` of the run that it left or joined last; LEFT is negative where it was
    evicted. ARRIVALS counts its gradients in the round and incarnation of its last
    arrival, INITIAL its initial tokens. SESSION is the number of its last join, LIFE
    the life of the process that has the replica's number. COUNTED is the stamp of the
    last batch that was accepted from it, COUNTED_ROUND 1 more than the round of that
    batch.
    """

    HEARD = 0
    ARRIVED_ROUND = 1
    ARRIVED_AT = 2
    LEFT = 3
    JOINED = 4
    ARRIVED_INCARNATION = 5
    ARRIVALS = 6
    INITIAL = 7
    SESSION = 8
    COUNTED = 9
    COUNTED_ROUND = 10
    LIFE = 11


_RING_BASE = 16
_REPLICA_BASE = _RING_BASE + RING
_ROWS_PER_REPLICA = 16


def run_mark(run: Any) -> Any:
    """Returns a run's mark on its replicas; never 0, which means nothing written."""
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
    """

    handle: tf.Tensor
    device: str
    baton: str  # shared name of a mutex; only its holder may change the variables

    def read(self, keys: Sequence[int]) -> tf.Tensor:
        """Reads rows, int64 [len(keys)]; 0 where nothing was written."""
        found = tf.raw_ops.LookupTableFindV2(
            table_handle=self.handle,
            keys=tf.constant(keys, tf.int64),
            default_value=tf.constant(0, tf.int64),
        )
        found.set_shape([len(keys)])
        return found

    def read_of(self, replica: int, *fields: ReplicaField) -> tf.Tensor:
        """Reads fields of one replica, int64 [len(fields)]."""
        return self.read([replica_key(replica, field) for field in fields])

    def read_fields(self, replicas: int, *fields: ReplicaField) -> list[tf.Tensor]:
        """Reads each field of replicas 0 to ``replicas`` - 1, int64 [replicas]."""
        return [self.read(replica_keys(replicas, field)) for field in fields]

    def write(
        self,
        rows: Mapping[Any, Any] | Sequence[tuple[Any, Any]],
        *,
        where: tf.Tensor | None = None,
    ) -> Any:
        """Returns the op that writes rows; ``where`` is bool, [] or one per row."""
        pairs = list(rows.items()) if isinstance(rows, Mapping) else list(rows)
        keys, values = (_as_vector(column) for column in zip(*pairs, strict=True))
        if where is not None:
            chosen = tf.where(tf.broadcast_to(where, tf.shape(keys)))[:, 0]
            keys, values = tf.gather(keys, chosen), tf.gather(values, chosen)
        return tf.raw_ops.LookupTableInsertV2(
            table_handle=self.handle, keys=keys, values=values
        )

    def write_of(
        self,
        replica: int,
        rows: Mapping[ReplicaField, Any],
        *,
        where: tf.Tensor | None = None,
    ) -> Any:
        """Writes fields of one replica; see ``write``."""
        keyed = {replica_key(replica, field): row for field, row in rows.items()}
        return self.write(keyed, where=where)

    def now(self, *, above: Sequence[tf.Tensor] = ()) -> tf.Tensor:
        """Returns server time in microseconds, int64 [], greater than all ``above``."""
        now = tf.cast(tf.timestamp() * 1e6, tf.int64)
        for number in above:
            now = tf.maximum(now, number + 1)
        return now

    def take_baton(self) -> tf.Tensor:
        """Waits for the baton; a step that ends without ``give_back`` gives it back."""
        mutex = tf.raw_ops.MutexV2(shared_name=self.baton)
        return tf.raw_ops.MutexLock(mutex=mutex)

    def give_back(self, baton: tf.Tensor, *, after: Any) -> tf.Operation:
        """Returns the op that releases the baton."""
        with tf.control_dependencies(after):
            return tf.raw_ops.ConsumeMutexLock(mutex_lock=baton)

    def draw_number(self) -> tf.Tensor:
        """Draws the number of a hold or release, greater than all before, int64 []."""
        number = self.now(above=[self.read([RunField.DRAWN])[0]])
        with tf.control_dependencies([self.write({RunField.DRAWN: number})]):
            return tf.identity(number)


def make_run_table(device: str, *, shared_name: str) -> RunTable:
    """Makes a table that all processes share by name; call in ``detached_scope``."""
    with tf.device(device):
        handle = tf.raw_ops.MutableHashTableV2(
            key_dtype=tf.int64,
            value_dtype=tf.int64,
            container="",
            shared_name=shared_name,
            use_node_name_sharing=False,
        )
    return RunTable(handle, device, f"{shared_name}/baton")


def _as_vector(parts: Sequence[Any]) -> tf.Tensor:
    """Joins numbers and vectors."""
    known = [tf.cast(part, tf.int64) for part in parts]
    if all(part.shape.rank == 0 for part in known):
        return tf.stack(known)
    return tf.concat([tf.reshape(part, [-1]) for part in known], axis=0)


REFUSED = -1
"""Session number of a process whose replica number a later process has taken."""


def draw_life(table: RunTable, replica: int) -> tf.Tensor:
    """Returns a life for a process about to join, greater than any before, int64 [].

    It is drawn separately, before the first join: otherwise, a join left behind by a
    dead process would count as the latest.
    """
    latest = table.read_of(replica, ReplicaField.LIFE, ReplicaField.COUNTED)
    return table.now(above=tf.unstack(latest))


def has_number(table: RunTable, replica: int, life: tf.Tensor) -> tf.Tensor:
    """Returns whether a replica's number is still this life's, bool []."""
    latest = table.read_of(replica, ReplicaField.LIFE)[0]
    return tf.logical_or(tf.equal(life, 0), life >= latest)  # 0: has drawn none


def take_number(table: RunTable, replica: int, life: tf.Tensor) -> tf.Operation:
    """Returns the op that gives a replica's number to a life, if that is the latest."""
    latest = table.read_of(replica, ReplicaField.LIFE)[0]
    return table.write_of(replica, {ReplicaField.LIFE: life}, where=life > latest)


def mark_evicted(table: RunTable, out: tf.Tensor, *, run: tf.Tensor) -> tf.Operation:
    """Returns the op that marks and counts replicas as evicted, under the baton."""
    keys = replica_keys(out.shape[0], ReplicaField.LEFT)
    mark = run_mark(run)
    out = tf.logical_and(out, tf.not_equal(tf.abs(table.read(keys)), mark))
    count = table.read([RunField.EVICTED])[0]
    more = tf.reduce_sum(tf.cast(out, tf.int64))
    counted = table.write({RunField.EVICTED: count + more})
    marks = tf.fill(out.shape, -mark)
    return tf.group(counted, table.write([(keys, marks)], where=out))


TICKET_SIZE = 6
NOTICE = -1
"""Round of a ticket without a gradient, which makes the chief read the table again."""


def make_ticket(
    replica: int,
    position: tf.Tensor,
    *,
    session: tf.Tensor,
    stamp: tf.Tensor,
    weight: Any = None,
) -> tf.Tensor:
    """Makes a ticket on the worker; its last element is the bits of the weight."""
    own = tf.constant([replica], tf.int64)
    number = scalar_of(1.0 if weight is None else weight, tf.float64)
    bits = tf.bitcast(number, tf.int64)
    return tf.concat([own, position, tf.stack([session, stamp, bits])], axis=0)


def weight_of(ticket: tf.Tensor) -> tf.Tensor:
    """Returns the weight of the ticket's gradients, float64 []."""
    return tf.bitcast(ticket[5], tf.float64)


def make_notice(replica: int, incarnation: tf.Tensor) -> tf.Tensor:
    """Makes a ticket that only wakes the chief of an incarnation."""
    return tf.stack([replica, NOTICE, incarnation, NOTICE, NOTICE, NOTICE])
