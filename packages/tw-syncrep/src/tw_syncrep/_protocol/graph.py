"""What one ``apply_gradients`` has in the graph: shared state, and a replica's ops.

The processes of a cluster build a graph each. They share the state, which lies on the
servers under the same names in all of them; of the ops, each runs its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_syncrep._exact_device_scope import detached_scope
from tw_syncrep._protocol.queues import (
    GradientQueue,
    WakeQueues,
    make_gradient_queue,
    make_wake_queues,
)
from tw_syncrep._protocol.run_table import (
    TICKET_SIZE,
    RunField,
    RunTable,
    make_notice,
    make_run_table,
)
from tw_syncrep._protocol.saving import HoldOps
from tw_syncrep._transfer.payload import Payload, SyncOptions, make_payloads

Publish = Callable[[tf.Operation], tf.Operation]
"""Takes what changes parameters; returns the op that has published them then."""


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
      is_elastic: whether replicas may be evicted, and come back by arriving.
    """

    table: RunTable
    arrivals: GradientQueue
    gradient_queues: tuple[GradientQueue, ...]
    wake_queues: WakeQueues
    quota: tuple[int, ...]
    aggregate: int
    is_elastic: bool

    @property
    def replicas(self) -> int:
        """How many replicas there are."""
        return len(self.quota)

    def notify_chief(self, replica: int) -> tf.Operation:
        """Returns the op, on the current device, that has the chief read the table."""
        incarnation = self.table.read([RunField.INCARNATION])[0]
        ticket = make_notice(replica, incarnation)
        return self.arrivals.enqueue(ticket, self.arrivals.payload.encode_nothing())

    @property
    def payloads(self) -> list[Payload]:
        """What a replica sends, for each server."""
        return [queue.payload for queue in (self.arrivals, *self.gradient_queues)]


@dataclass(frozen=True)
class LifecycleOps:
    """What runs around the steps.

    Attributes:
      join: before a replica's first step: it continues where the run stands.
      open: the chief's, before its first round: begins an incarnation and joins it.
      take_over: begins one in a lost chief's place; int64 [2] the incarnation that is
        in progress then, and whether this replica has begun it.
      initial: int64 [R], feeds ``open`` and ``take_over`` with each replica's initial
        tokens; none by default.
      claim: before a chief initializes or restores: int64 [], 0 where it is replaced.
      draw: int64 [], a life for a process that has not joined yet.
      life: int64 [], feeds ``join``, ``open`` and ``claim`` with the process's life; 0
        by default.
      leave: a replica's that has no more data.
      evict: has the round no longer wait for replicas that have not arrived.
      whom: int64 [R], feeds ``evict`` and ``take_over``: 1 for those replicas.
      close: ends the run for all; the chief's, at an orderly end.
      heartbeat: records that the replica lives.
      wake: wakes the replica's own training op, in the wait that ``position`` names.
      position: int64 [2], feeds ``wake``, ``evict`` and ``take_over`` with the round
        and incarnation of a wait; by default those that the replica computes for.
      status: int64 vectors that ``read_status`` understands.
    """

    join: tf.Operation
    open: tf.Operation
    take_over: tf.Tensor
    initial: tf.Tensor
    claim: tf.Tensor
    draw: tf.Tensor
    life: tf.Tensor
    leave: tf.Operation
    evict: tf.Operation
    whom: tf.Tensor
    close: tf.Operation
    heartbeat: tf.Operation
    wake: tf.Operation
    position: tf.Tensor
    status: Sequence[tf.Tensor]


@dataclass(frozen=True)
class SyncGraph:
    """One replica's part of the graph, and the chief's round.

    Attributes:
      state: what it shares with the other replicas.
      replica: this replica's number.
      train_op: the replica's step.
      reply: what the step returns, int64 [4]: round, incarnation, global step and
        ``WakeReason``.
      position: local variable, int64 [2]: round and incarnation that the replica
        computes for.
      session: local variable, int64 []: in which the replica has joined.
      stamp: int64 [], feeds ``train_op`` with its batch's number.
      round_op: one round of the chief.
      incarnation: int64 [], feeds ``round_op`` with the incarnation that it is for.
      holding: what holds the rounds while the chief saves.
      uninitialized: names of global variables without a value, string [*].
      ops: everything around the steps.
    """

    state: SyncState
    replica: int
    train_op: tf.Operation
    reply: tf.Tensor
    position: tf.Variable
    session: tf.Variable
    stamp: tf.Tensor
    round_op: tf.Operation
    incarnation: tf.Tensor
    holding: HoldOps
    uninitialized: tf.Tensor
    ops: LifecycleOps

    @property
    def replicas(self) -> int:
        """How many replicas there are."""
        return self.state.replicas

    @property
    def aggregate(self) -> int:
        """How many gradients make a step."""
        return self.state.aggregate

    def runs_step(self, fetches: Sequence[Any]) -> bool:
        """Returns whether fetching ops, tensors or their names runs the step."""
        step = self.train_op
        found = [step.graph.as_graph_element(fetch) for fetch in fetches]
        todo = [fetch.op if isinstance(fetch, tf.Tensor) else fetch for fetch in found]
        seen = set(todo)
        while todo and step not in seen:
            above = todo.pop()
            before = {tensor.op for tensor in above.inputs} | set(above.control_inputs)
            todo += before - seen
            seen |= before
        return step in seen


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
        payloads = make_payloads(
            grads, variables, options, ticket_size=TICKET_SIZE, shared_name=name
        )
        arrivals = make_gradient_queue(
            device,
            payloads.pop(
                device,
                Payload((), (), options.wire_dtype, TICKET_SIZE, options.weighs),
            ),
            shared_name=f"{name}/arrivals",
            name="arrivals",
        )
        wake_queues = make_wake_queues(
            table, replicas=options.total, shared_name=f"{name}/tokens"
        )
        gradient_queues = tuple(
            make_gradient_queue(
                server, payload, shared_name=f"{name}/gradients_{n}", name="gradients"
            )
            for n, (server, payload) in enumerate(payloads.items())
        )
    quota = share_out(max(options.aggregate, options.total), options.total)
    return SyncState(
        *(table, arrivals, gradient_queues, wake_queues),
        *(quota, options.aggregate, options.is_elastic),
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
