"""The graph of one ``apply_gradients``: shared state, and a replica's ops.

Each process of a cluster builds its own graph. All share the state, which is on the
servers under the same names; each runs only its own ops.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_syncrep._parameters.cache import ops_up_to
from tw_syncrep._protocol.queues import (
    GradientQueue,
    WakeQueues,
    make_gradient_queue,
    make_wake_queues,
)
from tw_syncrep._protocol.run_table import TICKET_SIZE, RunTable, make_run_table
from tw_syncrep._transfer.payload import Payload, SyncOptions, make_payloads


@dataclass(frozen=True)
class SyncState:
    """The resources of one optimizer, which all processes share by name."""

    table: RunTable
    arrivals: GradientQueue  # announcements, with gradients for the table's server
    gradient_queues: tuple[GradientQueue, ...]  # of the other servers
    wake_queues: WakeQueues
    global_step: tf.Variable
    replicas: int
    quota: tuple[int, ...]  # [R] slots that each replica may fill in a round
    aggregate: int  # gradients per round
    is_elastic: bool  # replicas may be evicted, and come back by arriving

    @property
    def payloads(self) -> list[Payload]:
        """The payload that a replica sends to each server."""
        return [queue.payload for queue in (self.arrivals, *self.gradient_queues)]


@dataclass(frozen=True)
class LifecycleOps:
    """The ops around the steps, and placeholders that feed them; tensors are int64."""

    join: tf.Operation
    open: tf.Operation  # the chief's, instead of ``join``
    take_over: tf.Tensor  # [2] the current incarnation; 1 if this replica began it
    initial: tf.Tensor  # [R] initial tokens; feeds ``open`` and ``take_over``
    claim: tf.Tensor  # [] run before a chief initializes or restores; 0 if replaced
    draw: tf.Tensor  # [] a life, for a process that has not joined yet
    life: tf.Tensor  # [] feeds ``join``, ``open`` and ``claim``
    leave: tf.Operation
    evict: tf.Operation
    whom: tf.Tensor  # [R] 1 for each replica to evict; feeds ``evict``, ``take_over``
    close: tf.Operation  # ends the run for all
    heartbeat: tf.Operation
    wake: tf.Operation
    position: tf.Tensor  # [2] feeds ``wake``, ``evict``, ``take_over``; default: own
    status: Sequence[tf.Tensor]  # for ``read_status``
    next_hold: tf.Tensor  # [] lowest number of a hold requested after this
    hold: tf.Operation  # holds the rounds; returns when released
    held: tf.Tensor  # [] number of the last hold that began
    release: tf.Operation


@dataclass(frozen=True)
class SyncGraph:
    """One replica's part of the graph, and the chief's round."""

    state: SyncState
    replica: int
    reply: (
        tf.Tensor
    )  # int64 [4], of ``train_op``: round, incarnation, global step, ``WakeReason``
    position: tf.Variable  # local; the replica computes for this round and incarnation
    session: tf.Variable  # local; the session in which the replica has joined
    stamp: tf.Tensor  # int64 []: feeds ``train_op`` with its batch's number
    round_op: tf.Operation
    incarnation: tf.Tensor  # int64 []: feeds ``round_op``
    uninitialized: tf.Tensor  # string [*]: names of global variables without a value
    ops: LifecycleOps

    @property
    def train_op(self) -> tf.Operation:
        """The replica's step."""
        return self.reply.op

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self.state.replicas

    @property
    def aggregate(self) -> int:
        """The number of gradients per step."""
        return self.state.aggregate

    def runs_step(self, fetches: Sequence[Any]) -> bool:
        """Returns whether fetching ops, tensors or their names runs the step."""
        step = self.train_op
        found = [step.graph.as_graph_element(fetch) for fetch in fetches]
        ops = [fetch.op if isinstance(fetch, tf.Tensor) else fetch for fetch in found]
        return step in ops_up_to(ops)


def make_state(
    grads: Sequence[Any],
    variables: Sequence[tf.Variable],
    options: SyncOptions,
    *,
    global_step: tf.Variable,
    name: str,
) -> SyncState:
    """Makes the shared resources, detached; the global step's server has the table."""
    device = global_step.device
    with tf.name_scope(f"{name}/meeting/"):
        table = make_run_table(device, shared_name=f"{name}/board")
        payloads = make_payloads(
            grads,
            variables,
            options,
            first=device,
            ticket_size=TICKET_SIZE,
            shared_name=name,
        )
        arrivals = make_gradient_queue(
            device,
            payloads.pop(device),
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
        *(table, arrivals, gradient_queues, wake_queues, global_step),
        *(options.total, quota, options.aggregate, options.is_elastic),
    )


def share_out(count: int, replicas: int) -> tuple[int, ...]:
    """Divides slots or tokens among the replicas as evenly as possible.

    >>> share_out(5, 3)
    (2, 2, 1)
    """
    share, more = divmod(count, replicas)
    return tuple(share + (replica < more) for replica in range(replicas))


def share_initial_tokens(state: SyncState, num_tokens: int) -> tuple[int, ...]:
    """Divides initial tokens, with which replicas continue before step 1 is over.

    They are needed when there are fewer replicas than gradients per step: some replica
    must then contribute a second gradient before the first round can end. With more,
    replicas compute gradients that arrive too late, as with TensorFlow's default.
    """
    needed = max(0, state.aggregate - state.replicas)
    if num_tokens == -1:
        num_tokens = needed
    if num_tokens < needed:
        raise ValueError(
            "SyncReplicasOptimizer.get_init_tokens_op: Too few tokens to finish the "
            f"first step: {num_tokens} (given) vs {needed} (needed)."
        )
    return share_out(num_tokens, state.replicas)
