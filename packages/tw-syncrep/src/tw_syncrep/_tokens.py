"""How a replica waits for the end of a round, and what wakes it up.

Every replica has a queue of its own, so that no replica takes what is meant for
another. A token says why it was sent; where the run stands is read from the
board afterwards, and never from the token: a replica that was slow goes on at
the present round, not at the one that followed its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import tensorflow as tf

from tw_syncrep._board import Board, Field
from tw_syncrep._on_device import on_device

_BACKLOG = 4
"""Tokens per slot that a replica may leave unread before it gets no more."""


class Token(IntEnum):
    """Why a replica was woken; in a queue with the round and epoch of a GUARD."""

    LOOK = 0  # The run has moved on: look at the board.
    AGAIN = 1  # Compute one more gradient for the same round.
    CLOSED = 2  # The chief has ended the run.
    GUARD = 3  # The replica's own guard has waited long enough.


@dataclass(frozen=True)
class Waiting:
    """The queues of tokens, int64 [3], one a replica, on the board's server."""

    board: Board
    queues: tuple[tf.queue.QueueBase, ...]

    def wait(self, replica: int, place: tf.Tensor) -> tf.Tensor:
        """Waits until the round is over or a token says otherwise.

        Args:
          replica: who waits.
          place: int64 [2], round and epoch of its own gradient, on the server.

        Returns:
          int64 [3]: the round and the epoch to go on with, and the token.
        """
        with on_device(self.board.device):

            def look() -> tf.Tensor:
                return self.board.read([Field.ROUND, Field.EPOCH, Field.CLOSED])

            as_before = tf.concat([place, [0]], axis=0)  # and not closed

            def still(stand: tf.Tensor, token: tf.Tensor) -> tf.Tensor:
                return tf.logical_and(
                    tf.reduce_all(tf.equal(stand, as_before)),
                    tf.equal(_reason(token, place), Token.LOOK),
                )

            def read_token(*_: tf.Tensor) -> list[tf.Tensor]:
                token = self.queues[replica].dequeue()
                with tf.control_dependencies([token]):
                    return [look(), token]

            nothing = _plain([Token.LOOK])[0]
            stand, token = tf.while_loop(
                still, read_token, [look(), nothing], parallel_iterations=1
            )
            closed = tf.constant(Token.CLOSED, tf.int64)
            reason = tf.where(stand[2] > 0, closed, _reason(token, place))
            return tf.concat([stand[:2], reason[tf.newaxis]], axis=0)

    def send(self, replica: int, token: Token, *, count: int = 1) -> tf.Operation:
        """Returns the op that puts ``count`` tokens into one replica's queue."""
        with on_device(self.board.device):
            return self.queues[replica].enqueue_many([_plain([token] * count)])

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
        return tf.group(*(self.send(r, token) for r in range(len(self.queues))))

    def end_round(self, quota: Sequence[int]) -> tf.Operation:
        """Returns the op that starts the next round for every replica.

        A replica with several slots gets a token for each further gradient. One
        that reads none, being slow or gone, does not pile them up.
        """
        return tf.group(*(self._start(r, slots) for r, slots in enumerate(quota)))

    def close_queues(self) -> tf.Operation:
        """Returns the op after which waiting fails with ``OutOfRangeError``."""
        with on_device(self.board.device):
            return tf.group(*(queue.close() for queue in self.queues))

    def _start(self, replica: int, slots: int) -> tf.Operation:
        queue = self.queues[replica]
        with on_device(self.board.device):
            tokens = _plain([Token.LOOK] + [Token.AGAIN] * (slots - 1))
            has_room = tf.cast(queue.size() < _BACKLOG * slots, tf.int32)
            return queue.enqueue_many([tokens[: has_room * slots]])


def _plain(tokens: Sequence[Token]) -> tf.Tensor:
    """Returns T tokens for any round and epoch, int64 [T, 3]."""
    rows = [[token, 0, 0] for token in tokens]
    return tf.constant(rows, tf.int64, shape=[len(rows), 3])


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
