"""Everything that one ``apply_gradients`` puts into the graph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_syncrep._exact_device_scope import apart_from_the_caller
from tw_syncrep._protocol.chief import Apply, Meeting, build_round
from tw_syncrep._protocol.decision import Arrivals, quotas
from tw_syncrep._protocol.gradient_queue import Lane, make_queue
from tw_syncrep._protocol.lifecycle import SessionOps, build_session_ops
from tw_syncrep._protocol.run_table import Board, make_board
from tw_syncrep._protocol.wake_queues import make_waiting
from tw_syncrep._protocol.worker import Replica, build_step, make_replica
from tw_syncrep._transfer.gradients import make_payloads
from tw_syncrep._transfer.payload import Payload

NAMES = "tw_syncrep_optimizers"


@dataclass(frozen=True)
class SyncOptions:
    """How gradients travel and are counted.

    Attributes:
      aggregate: gradients that make a step.
      total: replicas.
      below: bytes of a tensor that travels in a pack with others.
      wire_dtype: what wider floats are pushed as, or None.
      sparse_mean: "replicas" or "per_row".
    """

    aggregate: int
    total: int
    below: int
    wire_dtype: tf.DType | None
    sparse_mean: str


@dataclass(frozen=True)
class SyncGraph:
    """The parts of the graph that optimizer and hook run.

    Attributes:
      meeting: where the replicas meet.
      replica: this one's part.
      train_op: a replica's step.
      reply: what the step returned with, int64 [4].
      round_op: one round of the chief.
      ops: everything around the steps.
      uninitialized: names of global variables without a value, string [*].
    """

    meeting: Meeting
    replica: Replica
    train_op: tf.Operation
    reply: tf.Tensor
    round_op: tf.Operation
    ops: SessionOps
    uninitialized: tf.Tensor


def build_sync_graph(
    grads: Sequence[Any],
    variables: Sequence[tf.Variable],
    *,
    global_step: tf.Variable,
    replica_index: int,
    options: SyncOptions,
    apply: Apply,
    name: str,
) -> SyncGraph:
    """Builds a replica's step, the chief's round and the ops around them.

    Args:
      grads: [N] this replica's gradients, None among them.
      variables: [N] on the parameter servers.
      global_step: the replicas meet on its device.
      replica_index: this replica's number.
      options: how gradients travel.
      apply: applies mean gradients, by index.
      name: of the optimizer; made unique in the graph, alike in all processes.
    """
    own_name = _unique_name(name)
    meeting = _make_meeting(grads, variables, global_step.device, options, own_name)
    replica = make_replica(
        replica_index,
        variables,
        step_dtype=global_step.dtype.base_dtype,
        name=own_name,
        below=options.below,
    )
    by_index = {n: grad for n, grad in enumerate(grads) if grad is not None}
    with tf.name_scope(f"{own_name}/step/"):
        train_op, reply = build_step(meeting, replica, by_index)
    with tf.name_scope(f"{own_name}/round/"):
        round_op = build_round(meeting, apply, global_step=global_step)
    uninitialized = _report_uninitialized()
    with tf.name_scope(f"{own_name}/session/"):
        ops = build_session_ops(meeting, replica, global_step=global_step)
    return SyncGraph(meeting, replica, train_op, reply, round_op, ops, uninitialized)


def _make_meeting(
    grads: Sequence[Any],
    variables: Sequence[tf.Variable],
    device: str,
    options: SyncOptions,
    name: str,
) -> Meeting:
    with apart_from_the_caller(), tf.name_scope(f"{name}/meeting/"):
        board = make_board(device, shared_name=f"{name}/board")
        payloads = make_payloads(
            grads,
            variables,
            below=options.below,
            wire_dtype=options.wire_dtype,
            sparse_mean=options.sparse_mean,
            slots=options.aggregate,
            shared_name=name,
        )
        here = payloads.pop(device, Payload((), (), options.wire_dtype))
        arrivals = _make_arrivals(
            board, here, options, name=f"{name}/arrivals", keeps_tickets=bool(payloads)
        )
        waiting = make_waiting(
            board, replicas=options.total, shared_name=f"{name}/tokens"
        )
        return Meeting(arrivals, waiting, _make_lanes(payloads, name))


def _make_arrivals(
    board: Board,
    payload: Payload,
    options: SyncOptions,
    *,
    name: str,
    keeps_tickets: bool,
) -> Arrivals:
    return Arrivals(
        board=board,
        queue=make_queue(board.device, payload, shared_name=name, name="arrivals"),
        payload=payload,
        quota=quotas(options.aggregate, options.total),
        aggregate=options.aggregate,
        keeps_tickets=keeps_tickets,
    )


def _make_lanes(payloads: Mapping[str, Payload], name: str) -> tuple[Lane, ...]:
    lanes = []
    for number, (server, payload) in enumerate(payloads.items()):
        shared_name = f"{name}/gradients_{number}"
        queue = make_queue(server, payload, shared_name=shared_name, name="gradients")
        lanes.append(Lane(server, queue, payload))
    return tuple(lanes)


def _report_uninitialized() -> tf.Tensor:
    with apart_from_the_caller():
        # As it comes, TensorFlow complains where nobody runs it.
        return tf.identity(
            tf.compat.v1.report_uninitialized_variables(tf.compat.v1.global_variables())
        )


def _unique_name(name: str) -> str:
    """Numbers optimizers of one name in a graph, so that they share no queue."""
    taken = tf.compat.v1.get_collection_ref(NAMES)
    taken.append(name)
    count = taken.count(name)
    return name if count == 1 else f"{name}_{count - 1}"
