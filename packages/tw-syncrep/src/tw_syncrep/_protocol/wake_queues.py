"""How a replica waits for the end of a round, and what wakes it up.

Every replica has a queue of its own, so that no replica takes what is meant for
another. A token says why it was sent; where the run stands is read from the
board afterwards, and never from the token: a replica that was slow goes on at
the present round, not at the one that followed its own.

A replica does not wait where it has to bring another gradient for the same round:
where it has several slots, and in an epoch's first round, once for each initial
token. The latter hold even if that round is over by then, as with TensorFlow's
class, so that what counts does not depend on who was fast.
"""

from dataclasses import dataclass
from enum import IntEnum

import tensorflow as tf

from tw_syncrep._exact_device_scope import on_device
from tw_syncrep._protocol.run_table import Board, Field, ReplicaField, replica_key

# Where a replica finds what in the rows of the board that it looks at.
_NOW, _FIRST, _CLOSED, _INITIAL = slice(0, 3), slice(3, 6), 6, 7
_BACKLOG = 4
"""Tokens that a replica may leave unread before it gets no more."""


class Token(IntEnum):
    """Why a replica was woken; in a queue with the round and epoch of a GUARD."""

    LOOK = 0  # Something has changed: look at the board.
    CLOSED = 1  # The chief has ended the run.
    GUARD = 2  # The replica's own guard has waited long enough.


@dataclass(frozen=True)
class Waiting:
    """The queues of tokens, int64 [3], one a replica, on the board's server."""

    board: Board
    queues: tuple[tf.queue.QueueBase, ...]

    def wait(
        self, replica: int, place: tf.Tensor, count: tf.Tensor, *, quota: int
    ) -> tf.Tensor:
        """Waits until the replica may go on or a token says otherwise.

        Args:
          replica: who waits.
          place: int64 [2], round and epoch of its own gradient, on the server.
          count: int64 [], its gradients of that round and epoch, this one included.
          quota: its slots in a round.

        Returns:
          int64 [4]: the round, the epoch and the global step to go on with, and the
          token.
        """
        with on_device(self.board.device):

            def look() -> tf.Tensor:
                return self.board.read(_stand_keys(replica))

            def still(stand: tf.Tensor, token: tf.Tensor) -> tf.Tensor:
                changes = [
                    tf.reduce_any(tf.not_equal(stand[_NOW][:2], place)),
                    count < quota,
                    _repeats(stand, place, count),
                    stand[_CLOSED] > 0,
                    tf.not_equal(_reason(token, place), Token.LOOK),
                ]
                return tf.logical_not(tf.reduce_any(tf.stack(changes)))

            def read_token(*_: tf.Tensor) -> list[tf.Tensor]:
                token = self.queues[replica].dequeue()
                with tf.control_dependencies([token]):
                    return [look(), token]

            nothing = _plain(Token.LOOK)
            stand, token = tf.while_loop(
                still, read_token, [look(), nothing], parallel_iterations=1
            )
            repeats = _repeats(stand, place, count)
            goes_on_at = tf.where(repeats, stand[_FIRST], stand[_NOW])
            closed = tf.constant(Token.CLOSED, tf.int64)
            reason = tf.where(stand[_CLOSED] > 0, closed, _reason(token, place))
            return tf.concat([goes_on_at, reason[tf.newaxis]], axis=0)

    def wake(self, replica: int, place: tf.Tensor) -> tf.Operation:
        """Returns the op that ends a replica's wait.

        Args:
          replica: who waits.
          place: int64 [2], the round and epoch that it waits in; another wait,
            after this one has ended otherwise, goes on.
        """
        with on_device(self.board.device):
            guard = tf.constant([Token.GUARD], tf.int64)
            return self.queues[replica].enqueue([tf.concat([guard, place], axis=0)])

    def send_all(self, token: Token) -> tf.Operation:
        """Returns the op that sends a token to every replica."""
        with on_device(self.board.device):
            return tf.group(*(q.enqueue(_plain(token)) for q in self.queues))

    def end_round(self) -> tf.Operation:
        """Returns the op that has every replica look at the next round.

        For one that reads no tokens, being slow or gone, they do not pile up.
        """
        return tf.group(*(self._start(queue) for queue in self.queues))

    def close_queues(self) -> tf.Operation:
        """Returns the op after which waiting fails with ``OutOfRangeError``."""
        with on_device(self.board.device):
            return tf.group(*(queue.close() for queue in self.queues))

    def _start(self, queue: tf.queue.QueueBase) -> tf.Operation:
        with on_device(self.board.device):
            has_room = tf.cast(queue.size() < _BACKLOG, tf.int32)
            return queue.enqueue_many([_plain(Token.LOOK)[tf.newaxis][:has_room]])


def _stand_keys(replica: int) -> list[int]:
    """Returns the rows that a replica looks at; what _NOW, _FIRST, ... find."""
    return [
        *(Field.ROUND, Field.EPOCH, Field.STEP),
        *(Field.FIRST_ROUND, Field.EPOCH, Field.FIRST_STEP),
        Field.CLOSED,
        replica_key(replica, ReplicaField.INITIAL),
    ]


def _repeats(stand: tf.Tensor, place: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Tells whether initial tokens have a replica repeat the first round, bool []."""
    is_first = tf.reduce_all(tf.equal(stand[_FIRST][:2], place))
    return tf.logical_and(is_first, count <= stand[_INITIAL])


def _plain(token: Token) -> tf.Tensor:
    """Returns a token for any round and epoch, int64 [3]."""
    return tf.constant([token, 0, 0], tf.int64)


def _reason(token: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
    """Returns why a replica at ``place`` is to go on, int64 []; or LOOK."""
    is_for_another = tf.logical_and(
        tf.equal(token[0], Token.GUARD), tf.reduce_any(tf.not_equal(token[1:], place))
    )
    return tf.where(is_for_another, tf.constant(Token.LOOK, tf.int64), token[0])


def make_waiting(board: Board, *, replicas: int, shared_name: str) -> Waiting:
    """Makes the queues, which all processes share by their names."""
    with on_device(board.device):
        queues = tuple(
            tf.queue.FIFOQueue(
                -1, [tf.int64], [[3]], shared_name=f"{shared_name}_{r}", name="tokens"
            )
            for r in range(replicas)
        )
    return Waiting(board, queues)
