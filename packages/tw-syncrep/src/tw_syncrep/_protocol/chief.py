"""How the chief begins: a run, an incarnation, and who gets initial tokens."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tw_syncrep._exact_device_scope import detached_scope, exact_device_scope
from tw_syncrep._protocol.graph import SyncState, share_initial_tokens
from tw_syncrep._protocol.run_table import ReplicaField, RunField, replica_keys
from tw_syncrep._protocol.saving import release_holds


def build_open(
    state: SyncState,
    chief: int,
    *,
    initial: tf.Tensor,
    global_step: tf.Variable,
    join: Callable[[], tf.Operation],
) -> tf.Operation:
    """Returns the op that begins an incarnation, and a run where the last has ended.

    Nothing that was interrupted before reaches into the incarnation. A round that was
    cut off while its means were being applied counts as over: its gradients are not
    applied twice, though some variables may have missed them. Initial tokens are
    written with the incarnation, as replicas begin their steps when they see it.

    Args:
      state: of the optimizer.
      chief: its number among the replicas.
      initial: int64 [R], initial tokens of each replica.
      global_step: what the incarnation continues with.
      join: returns the op with which the chief, a replica itself, joins.
    """
    table = state.table
    # A chief that is gone may hold the rounds still.
    with tf.control_dependencies([release_holds(table)]):
        baton = table.take_baton()
    with tf.control_dependencies([baton]):
        cleared = [op for payload in state.payloads for op in payload.clear()]
    with tf.control_dependencies([baton, *cleared]):
        before = table.read(list(RunField))
        changing = before[RunField.CHANGING]
        is_cut_off = changing > 0
        first = tf.where(is_cut_off, changing, before[RunField.ROUND])
        cut_off = before[RunField.CUT_OFF] + tf.cast(is_cut_off, tf.int64)
        step = global_step.read_value()
        opened = table.write(
            {
                RunField.ROUND: first,
                RunField.INCARNATION: table.now(),
                RunField.CHANGING: 0,
                RunField.CUT_OFF: cut_off,
                RunField.CLOSED: 0,
                RunField.CHIEF: chief,
                RunField.FIRST_ROUND: first,
                RunField.RUN: before[RunField.RUN] + before[RunField.CLOSED],
                RunField.STEP: step,
                RunField.FIRST_STEP: step,
                **_initial_rows(initial, state.replicas),
            }
        )
    with tf.control_dependencies([opened]):
        given_back = table.give_back(baton)
    with tf.control_dependencies([given_back]):
        return tf.group(state.wake_queues.wake_all(), join())


def build_initial_tokens_op(state: SyncState, num_tokens: int) -> tf.Operation:
    """Returns the op that gives out initial tokens; see ``share_initial_tokens``."""
    counts = share_initial_tokens(
        num_tokens, aggregate=state.aggregate, replicas=state.replicas
    )
    with detached_scope():
        rows = _initial_rows(tf.constant(counts, tf.int64), state.replicas)
        with exact_device_scope(state.table.device):
            given = state.table.write(rows)
            with tf.control_dependencies([given]):
                # Replicas that already wait must read the table again.
                woken = state.wake_queues.wake_all()
        with tf.control_dependencies([given]):
            return tf.group(woken, name="init_tokens")


def make_queue_runner(state: SyncState, round_op: tf.Operation) -> Any:
    """Makes a ``QueueRunner`` of the chief's rounds; at its end it closes the queues.

    Args:
      state: of the optimizer.
      round_op: one round of the chief.
    """
    queue = state.arrivals.queue
    with detached_scope(), exact_device_scope(state.table.device):
        close = tf.group(queue.close(), state.wake_queues.close())
    return tf.compat.v1.train.QueueRunner(
        queue, [round_op], close_op=close, cancel_op=close
    )


def _initial_rows(initial: tf.Tensor, replicas: int) -> dict[Any, Any]:
    """Returns the table's rows for each replica's initial tokens, int64 [R]."""
    keys = replica_keys(replicas, ReplicaField.INITIAL)
    return dict(zip(keys, tf.unstack(initial, replicas), strict=True))
