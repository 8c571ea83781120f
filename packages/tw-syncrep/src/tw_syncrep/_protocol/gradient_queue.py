"""A lane: the gradients of one parameter server that is not the meeting place.

A worker puts what it has for a server into that server's queue as one element,
marked with its ticket. The chief takes out the elements whose tickets were
accepted, adds them up and throws the others away. The queue is first in, first
out, and an element is in it before its ticket is announced: whatever is in the
queue when a round is decided, and was not accepted, never will be.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_syncrep._exact_device_scope import on_device
from tw_syncrep._protocol.ticket import TICKET_SIZE, is_among
from tw_syncrep._transfer.payload import Payload


@dataclass(frozen=True)
class Lane:
    """The queue of one server.

    Attributes:
      server: device.
      queue: elements are a ticket and the payload.
      payload: what a replica sends there.
    """

    server: str
    queue: tf.queue.QueueBase
    payload: Payload

    def push(self, ticket: tf.Tensor, grads: Mapping[int, Any]) -> tf.Operation:
        """Sends a replica's gradients.

        Args:
          ticket: int64 [TICKET_SIZE], on the worker.
          grads: dense and sparse gradients by index.

        Returns:
          The op that has put them into the queue; it runs on the server.
        """
        sent = self.payload.of(grads)
        with on_device(self.server):
            return self.queue.enqueue([ticket, *sent])

    def collect(self, verdict: tf.Tensor) -> dict[int, Any]:
        """Means of the accepted replicas' gradients.

        Args:
          verdict: int64 [C, TICKET_SIZE] tickets, C >= 1, all of them in the
            queue.

        Returns:
          Gradients by index, on the server, of the dtype they were pushed with.
        """
        with on_device(self.server):
            # A loop with one input from elsewhere becomes a loop over the network.
            verdict = tf.identity(verdict)
            count = tf.shape(verdict)[0]

            def add_one(number: tf.Tensor, *sums: tf.Tensor) -> list[tf.Tensor]:
                sent = self._next_accepted(verdict)
                return [number + 1, *self.payload.add(sums, sent)]

            result = tf.while_loop(
                lambda number, *_: number < count,
                add_one,
                [tf.constant(0), *self.payload.start()],
                shape_invariants=[tf.TensorShape([]), *self.payload.sum_shapes()],
                parallel_iterations=1,
            )
            return self.payload.means(result[1:], count)

    def _next_accepted(self, verdict: tf.Tensor) -> list[tf.Tensor]:
        """Takes elements out until one is accepted; what was sent with it."""

        def rejected(ticket: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
            return tf.logical_not(is_among(ticket, verdict))

        unknown = [tf.TensorShape(None)] * len(self.payload.dtypes())
        element = tf.while_loop(
            rejected,
            lambda *_: self._take_out(),
            self._take_out(),
            shape_invariants=[tf.TensorShape([TICKET_SIZE]), *unknown],
            parallel_iterations=1,
        )
        return list(element[1:])

    def _take_out(self) -> list[tf.Tensor]:
        element: list[tf.Tensor] = self.queue.dequeue()
        element[0].set_shape([TICKET_SIZE])
        return element


def make_queue(
    server: str, payload: Payload, *, shared_name: str, name: str
) -> tf.queue.QueueBase:
    """Makes a queue of tickets and payloads, which all processes share by its name."""
    with on_device(server):
        return tf.queue.FIFOQueue(
            -1, [tf.int64, *payload.dtypes()], shared_name=shared_name, name=name
        )
