"""Puts everything that one ``apply_gradients`` needs into the graph."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_syncrep._exact_device_scope import detached_scope
from tw_syncrep._protocol.chief import Apply, build_round
from tw_syncrep._protocol.graph import SyncGraph
from tw_syncrep._protocol.lifecycle import build_lifecycle_ops
from tw_syncrep._protocol.replica import make_replica
from tw_syncrep._protocol.state import SyncState, make_state
from tw_syncrep._protocol.worker import build_step
from tw_syncrep._transfer.payload import SyncOptions

_NAMES = "tw_syncrep_optimizers"


def build_sync_graph(
    grads: Sequence[Any],
    variables: Sequence[tf.Variable],
    options: SyncOptions,
    *,
    global_step: tf.Variable,
    replica_index: int,
    apply: Apply,
    name: str,
) -> tuple[SyncState, SyncGraph]:
    """Builds a replica's step, the chief's round and the ops around them.

    Args:
      grads: [N] this replica's gradients, None among them.
      variables: [N] on the parameter servers.
      options: how gradients travel, and how many make a step.
      global_step: replicas meet on its device.
      replica_index: this replica's number.
      apply: applies mean gradients, by index.
      name: of the optimizer; made unique in the graph, alike in all processes.

    Returns:
      What the replicas share, and this one's part of the graph.
    """
    name = _unique_name(name)
    state = make_state(grads, variables, options, device=global_step.device, name=name)
    replica = make_replica(
        replica_index,
        variables,
        step_dtype=global_step.dtype.base_dtype,
        name=name,
        below_bytes=options.below_bytes,
    )
    by_index = {n: grad for n, grad in enumerate(grads) if grad is not None}
    with tf.name_scope(f"{name}/step/"):
        train_op, reply = build_step(state, replica, by_index)
    with tf.name_scope(f"{name}/round/"):
        round_op = build_round(state, apply, global_step=global_step)
    uninitialized = _report_uninitialized()
    with tf.name_scope(f"{name}/session/"):
        ops = build_lifecycle_ops(state, replica, global_step=global_step)
    return state, SyncGraph(
        replica=replica_index,
        replicas=state.replicas,
        aggregate=state.aggregate,
        train_op=train_op,
        reply=reply,
        position=replica.position,
        round_op=round_op,
        uninitialized=uninitialized,
        ops=ops,
    )


def _report_uninitialized() -> tf.Tensor:
    with detached_scope():
        # Without the identity, TensorFlow complains where nobody runs it.
        return tf.identity(
            tf.compat.v1.report_uninitialized_variables(tf.compat.v1.global_variables())
        )


def _unique_name(name: str) -> str:
    """Numbers optimizers of one name in a graph, so that they share no queue."""
    taken = tf.compat.v1.get_collection_ref(_NAMES)
    taken.append(name)
    count = taken.count(name)
    return name if count == 1 else f"{name}_{count - 1}"
