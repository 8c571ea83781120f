"""The queues between replicas and chief: gradients one way, wake-ups the other.

All are on the parameter servers and shared by name, so an element may outlive the
process that enqueued it, and the chief that it was meant for. A gradient's ticket shows
whether it still counts; a token only makes its replica read the run table again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import tensorflow as tf

from tw_syncrep._parameters.placement import exact_device_scope
from tw_syncrep._protocol.run_table import (
    TICKET_SIZE,
    ReplicaField,
    RunField,
    RunTable,
    make_notice,
    replica_key,
    weight_of,
)
from tw_syncrep._transfer.payload import Payload

_BACKLOG = 4
"""A replica with this many unread tokens gets no more at the end of a round."""


@dataclass(frozen=True)
class GradientQueue:
    """Gradients that replicas send to one server, marked with tickets.

    A worker puts its gradients for a server into that server's queue as one element,
    with its ticket. On servers other than the run table's, the chief adds up the
    elements whose tickets were accepted and discards the rest. The queue is first in,
    first out, and an element is in it before its ticket is announced: one that is in
    the queue when a round is decided, and was not accepted, never will be.
    """

    server: str
    queue: tf.queue.QueueBase
    payload: Payload

    def receive(
        self, ticket: tf.Tensor, grads: Mapping[int, Any]
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Sends a replica's ticket and gradients, by index; returns both there."""
        sent = self.payload.encode(ticket, grads)
        with exact_device_scope(self.server):
            return self.payload.decode([tf.identity(tensor) for tensor in sent])

    def push(self, ticket: tf.Tensor, grads: Mapping[int, Any]) -> tf.Operation:
        """Returns the op that sends a replica's ticket and gradients, and enqueues."""
        received, sent = self.receive(ticket, grads)
        with exact_device_scope(self.server):
            return self.enqueue(received, sent)

    def enqueue(self, ticket: tf.Tensor, sent: Sequence[tf.Tensor]) -> tf.Operation:
        """Returns the op, on the current device, that enqueues an element."""
        return self.queue.enqueue([ticket, *sent])

    def notify(self, replica: int, incarnation: tf.Tensor) -> tf.Operation:
        """Returns the op that has the chief of an incarnation read the table."""
        nothing = [tf.zeros([0], dtype) for dtype in self.queue.dtypes[1:]]
        return self.enqueue(make_notice(replica, incarnation), nothing)

    def dequeue(self) -> list[tf.Tensor]:
        """Dequeues an element, on the current device: a ticket and its tensors."""
        element = self.queue.dequeue()
        element = [element] if isinstance(element, tf.Tensor) else list(element)
        element[0].set_shape([TICKET_SIZE])
        return element

    def mean_of(self, accepted: tf.Tensor) -> dict[int, Any]:
        """Returns the means, by index, of accepted gradients, which are all queued."""
        with exact_device_scope(self.server):
            # A loop with even one remote input becomes a loop over the network.
            accepted = tf.identity(accepted)
            count = tf.shape(accepted)[0]

            def add_next(number: tf.Tensor, *sums: tf.Tensor) -> list[tf.Tensor]:
                ticket, *sent = self.dequeue()
                is_same = tf.reduce_all(tf.equal(ticket, accepted), axis=1)
                added = tf.cond(
                    tf.reduce_any(is_same),
                    lambda: [
                        number + 1,
                        *self.payload.add(sums, sent, weight_of(ticket)),
                    ],
                    lambda: [number, *sums],
                )
                return list(added)

            result = tf.while_loop(
                lambda number, *_: number < count,
                add_next,
                [tf.constant(0), *self.payload.zeros()],
                shape_invariants=[tf.TensorShape([]), *self.payload.sum_shapes()],
                parallel_iterations=1,
            )
            return self.payload.means(result[1:], count)


class WakeReason(IntEnum):
    """Why a replica was woken; the first element of a token.

    A WATCHDOG token also carries the round and incarnation of the wait that it ends.
    REPLACED is never in a token: the replica has joined again in a later session.
    """

    TABLE_CHANGED = 0
    RUN_CLOSED = 1
    WATCHDOG = 2
    REPLACED = 3


@dataclass(frozen=True)
class WakeQueues:
    """The queues on which replicas wait for the end of a round.

    Every replica has its own queue, so that none takes a token meant for another. A
    token carries the reason why it was sent; the state of the run is then read from
    the run table, never from the token: a replica that was slow continues with the
    current round, not with the one that followed its own.

    A replica does not wait if it owes another gradient for the same round: if it has
    several slots and, in the first round of an incarnation, once for each initial
    token. The tokens apply even if that round is over by then, as with TensorFlow's
    class, so that the choice of gradients does not depend on which replica was fast.

    A wait that finds that its replica has joined again, in a later session, puts its
    token back and ends: TensorFlow may have dropped its cancellation.

    Like the table's, its methods build their ops on the current device.
    """

    table: RunTable
    queues: tuple[tf.queue.QueueBase, ...]  # one per replica, on the table's server

    def wait(
        self, replica: int, ticket: tf.Tensor, count: tf.Tensor, *, quota: int
    ) -> tf.Tensor:
        """Waits until the replica may continue; returns ``SyncGraph.reply``'s elements.

        ``count`` is the number of its gradients in the ticket's round, this one
        included; 0 if it need not wait.
        """
        _, round_number, incarnation, session, *_ = tf.unstack(ticket, num=TICKET_SIZE)
        unchanged = tf.stack([round_number, incarnation, session, 0])
        own_token = _token(WakeReason.WATCHDOG, round_number, incarnation)
        first = tf.stack([round_number, count])
        is_full = count >= quota
        read_rows = partial(self.table.read, _watched_keys(replica))

        def must_wait(rows: tf.Tensor, token: tf.Tensor) -> tf.Tensor:
            is_same = _are_equal(rows[:4], unchanged)
            # FIRST_ROUND is never later than the ticket's: >= means equality there.
            repeats = tf.reduce_all(rows[4:6] >= first)
            is_over = tf.logical_or(repeats, _are_equal(token, own_token))
            return is_same & is_full & tf.logical_not(is_over)

        def take_token(*_: tf.Tensor) -> list[tf.Tensor]:
            token = self.queues[replica].dequeue()
            with tf.control_dependencies([token]):
                rows = read_rows()
            is_others = tf.not_equal(rows[_SESSION], session)
            returned = _enqueue_if(is_others, self.queues[replica], token)
            with tf.control_dependencies([returned]):
                return [tf.identity(rows), token]

        nothing = _token(WakeReason.TABLE_CHANGED)
        rows, token = tf.while_loop(
            must_wait, take_token, [read_rows(), nothing], parallel_iterations=1
        )
        now, now_incarnation, latest, closed, *began = tf.unstack(rows)
        began_round, initial, step, began_step = began
        is_first = tf.equal(began_round, round_number)
        is_first &= tf.equal(now_incarnation, incarnation)
        progress = _choose(
            is_first & (count <= initial),
            tf.stack([began_round, now_incarnation, began_step]),
            tf.stack([now, now_incarnation, step]),
        )
        reason = tf.constant(WakeReason.TABLE_CHANGED, tf.int64)
        for is_so, other in (
            (_are_equal(token, own_token), WakeReason.WATCHDOG),
            (closed > 0, WakeReason.RUN_CLOSED),
            (tf.not_equal(latest, session), WakeReason.REPLACED),
        ):
            reason = _choose(is_so, tf.constant(other, tf.int64), reason)
        return tf.concat([progress, reason[tf.newaxis]], axis=0)

    def wake(self, replica: int, position: tf.Tensor) -> tf.Operation:
        """Returns the op by which a watchdog ends its replica's wait at a position."""
        token = _token(WakeReason.WATCHDOG, *tf.unstack(position, num=2))
        return self.queues[replica].enqueue([token])

    def wake_all(self) -> tf.Operation:
        """Returns the op that makes every replica read the table again."""
        changed = _token(WakeReason.TABLE_CHANGED)
        return tf.group(*(queue.enqueue(changed) for queue in self.queues))

    def end_round(self) -> tf.Operation:
        """Returns the op that makes every replica see the next round.

        Tokens do not pile up for a replica that is slow or gone.
        """
        changed = _token(WakeReason.TABLE_CHANGED)
        return tf.group(
            *(_enqueue_if(q.size() < _BACKLOG, q, changed) for q in self.queues)
        )

    def close(self) -> tf.Operation:
        """Returns the op after which waiting fails with ``OutOfRangeError``."""
        return tf.group(*(queue.close() for queue in self.queues))


def make_gradient_queue(
    server: str, payload: Payload, *, shared_name: str, name: str
) -> GradientQueue:
    """Makes a queue that all processes share by name; call in ``detached_scope``."""
    with tf.device(server):
        queue = tf.queue.FIFOQueue(
            -1, [tf.int64, *payload.dtypes()], shared_name=shared_name, name=name
        )
    return GradientQueue(server, queue, payload)


def make_wake_queues(table: RunTable, *, replicas: int, shared_name: str) -> WakeQueues:
    """Makes queues that all processes share by name; call in ``detached_scope``."""
    with tf.device(table.device):
        queues = tuple(
            tf.queue.FIFOQueue(
                -1, [tf.int64], [[3]], shared_name=f"{shared_name}_{r}", name="tokens"
            )
            for r in range(replicas)
        )
    return WakeQueues(table, queues)


def _watched_keys(replica: int) -> list[int]:
    """Returns the keys of the rows that ``wait`` reads, in its order."""
    return [
        *(RunField.ROUND, RunField.INCARNATION),
        replica_key(replica, ReplicaField.SESSION),
        *(RunField.CLOSED, RunField.FIRST_ROUND),
        replica_key(replica, ReplicaField.INITIAL),
        *(RunField.STEP, RunField.FIRST_STEP),
    ]


_SESSION = 2  # index of its row


def _token(
    reason: WakeReason, round_number: Any = 0, incarnation: Any = 0
) -> tf.Tensor:
    """Returns a token, int64 [3]; it ends any wait, a WATCHDOG's only one."""
    return tf.stack([tf.constant(reason, tf.int64), round_number, incarnation])


def _are_equal(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    return tf.reduce_all(tf.equal(one, other))


def _choose(condition: tf.Tensor, one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Selects like ``tf.where``, for equal shapes, without the cost of broadcasting."""
    return tf.raw_ops.Select(condition=condition, x=one, y=other)


def _enqueue_if(
    condition: tf.Tensor, queue: tf.queue.QueueBase, token: tf.Tensor
) -> tf.Operation:
    count = tf.cast(condition, tf.int32)
    return queue.enqueue_many([tf.broadcast_to(token, tf.stack([count, 3]))])
