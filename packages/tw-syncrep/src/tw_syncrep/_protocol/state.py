"""What the replicas of one optimizer share: run table, gradient and wake queues."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_syncrep._exact_device_scope import detached_scope, exact_device_scope
from tw_syncrep._protocol.run_table import TICKET_SIZE, RunTable, make_run_table
from tw_syncrep._protocol.wake_queues import WakeQueues, make_wake_queues
from tw_syncrep._transfer.payload import Payload, SyncOptions, make_payloads


@dataclass(frozen=True)
class GradientQueue:
    """What replicas send to one server, marked with tickets.

    A worker puts what it has for a server into that server's queue as one element,
    with its ticket. On servers other than the run table's, the chief takes out the
    elements whose tickets were accepted, adds them up and discards the others. The
    queue is first in, first out, and an element is in it before its ticket is
    announced: whatever is in the queue when a round is decided, and was not accepted,
    never will be.

    Attributes:
      server: device.
      queue: elements are a ticket and the payload's tensors.
      payload: what a replica sends there.
    """

    server: str
    queue: tf.queue.QueueBase
    payload: Payload

    def enqueue(self, ticket: tf.Tensor, sent: Sequence[tf.Tensor]) -> tf.Operation:
        """Returns the op, on the server, that has put a replica's element in.

        Args:
          ticket: int64 [TICKET_SIZE].
          sent: gradients as ``payload`` encodes them, on the worker.
        """
        with exact_device_scope(self.server):
            return self.queue.enqueue([ticket, *sent])

    def dequeue(self) -> list[tf.Tensor]:
        """Takes an element out, on the current device: a ticket and what was sent."""
        element = self.queue.dequeue()
        element = [element] if isinstance(element, tf.Tensor) else list(element)
        element[0].set_shape([TICKET_SIZE])
        return element

    def mean_of(self, accepted: tf.Tensor) -> dict[int, Any]:
        """Returns the means of the accepted gradients.

        Args:
          accepted: int64 [C, TICKET_SIZE] tickets, C >= 1, all of them in the queue.

        Returns:
          Gradients by index, on the server, of the dtype they were pushed with.
        """
        with exact_device_scope(self.server):
            # A loop with one input from elsewhere becomes a loop over the network.
            accepted = tf.identity(accepted)
            count = tf.shape(accepted)[0]

            def add_one(number: tf.Tensor, *sums: tf.Tensor) -> list[tf.Tensor]:
                sent = self._next_accepted(accepted)
                return [number + 1, *self.payload.add(sums, sent)]

            result = tf.while_loop(
                lambda number, *_: number < count,
                add_one,
                [tf.constant(0), *self.payload.zeros()],
                shape_invariants=[tf.TensorShape([]), *self.payload.sum_shapes()],
                parallel_iterations=1,
            )
            return self.payload.means(result[1:], count)

    def _next_accepted(self, accepted: tf.Tensor) -> list[tf.Tensor]:
        """Takes elements out until one is accepted; returns what was sent with it."""

        def is_rejected(ticket: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
            is_same = tf.reduce_all(tf.equal(ticket, accepted), axis=1)
            return tf.logical_not(tf.reduce_any(is_same))

        unknown = [tf.TensorShape(None)] * len(self.payload.dtypes())
        element = tf.while_loop(
            is_rejected,
            lambda *_: self.dequeue(),
            self.dequeue(),
            shape_invariants=[tf.TensorShape([TICKET_SIZE]), *unknown],
            parallel_iterations=1,
        )
        return list(element[1:])


@dataclass(frozen=True)
class SyncState:
    """The resources of one optimizer, which all processes share by their names.

    Attributes:
      table: how the run stands.
      arrivals: where replicas announce themselves, with their gradients for the
        table's server.
      gradient_queues: of the other servers that get gradients.
      wake_queues: how replicas are woken.
      quota: [R] slots that each replica may fill in a round.
      aggregate: gradients that make a round.
    """

    table: RunTable
    arrivals: GradientQueue
    gradient_queues: tuple[GradientQueue, ...]
    wake_queues: WakeQueues
    quota: tuple[int, ...]
    aggregate: int

    @property
    def replicas(self) -> int:
        """How many replicas there are."""
        return len(self.quota)

    @property
    def payloads(self) -> list[Payload]:
        """What a replica sends, for each server."""
        return [queue.payload for queue in (self.arrivals, *self.gradient_queues)]


def make_state(
    grads: Sequence[Any],
    variables: Sequence[tf.Variable],
    options: SyncOptions,
    *,
    device: str,
    name: str,
) -> SyncState:
    """Makes the shared resources.

    Args:
      grads: [N] this replica's gradients, None among them.
      variables: [N] on the parameter servers.
      options: how gradients travel, and how many make a step.
      device: the server of table, arrivals and wake queues.
      name: the optimizer's own in the graph.
    """
    with detached_scope(), tf.name_scope(f"{name}/meeting/"):
        table = make_run_table(device, shared_name=f"{name}/board")
        payloads = make_payloads(grads, variables, options, shared_name=name)
        arrivals = _make_queue(
            device,
            payloads.pop(device, Payload((), (), options.wire_dtype)),
            shared_name=f"{name}/arrivals",
            name="arrivals",
        )
        wake_queues = make_wake_queues(
            table, replicas=options.total, shared_name=f"{name}/tokens"
        )
        gradient_queues = tuple(
            _make_queue(
                server, payload, shared_name=f"{name}/gradients_{n}", name="gradients"
            )
            for n, (server, payload) in enumerate(payloads.items())
        )
    quota = share_out(max(options.aggregate, options.total), options.total)
    return SyncState(
        table, arrivals, gradient_queues, wake_queues, quota, options.aggregate
    )


def share_out(count: int, replicas: int) -> tuple[int, ...]:
    """Shares out slots or tokens among the replicas, as evenly as possible.

    >>> share_out(5, 3)
    (2, 2, 1)
    """
    share, more = divmod(count, replicas)
    return tuple(share + (replica < more) for replica in range(replicas))


def share_initial_tokens(
    num_tokens: int, *, aggregate: int, replicas: int
) -> tuple[int, ...]:
    """Shares out initial tokens, with which replicas continue before step 1 is over.

    They are needed where there are fewer replicas than gradients asked for: somebody
    must then bring a second gradient before the first round can end. More of them
    let replicas compute gradients that come too late, as TensorFlow's default does.

    Args:
      num_tokens: how many; -1 is as many as are needed.
      aggregate: gradients that make a step.
      replicas: how many there are.

    Returns:
      [replicas] tokens of each replica, as evenly as possible.

    Raises:
      ValueError: the first step could not end with so few.
    """
    needed = max(0, aggregate - replicas)
    if num_tokens == -1:
        num_tokens = needed
    if num_tokens < needed:
        raise ValueError(
            "SyncReplicasOptimizer.get_init_tokens_op: Too few tokens to finish the "
            f"first step: {num_tokens} (given) vs {needed} (needed)."
        )
    return share_out(num_tokens, replicas)


def _make_queue(
    server: str, payload: Payload, *, shared_name: str, name: str
) -> GradientQueue:
    """Makes a queue that all processes share by its name; in ``detached_scope``."""
    with tf.device(server):
        queue = tf.queue.FIFOQueue(
            -1, [tf.int64, *payload.dtypes()], shared_name=shared_name, name=name
        )
    return GradientQueue(server, queue, payload)
