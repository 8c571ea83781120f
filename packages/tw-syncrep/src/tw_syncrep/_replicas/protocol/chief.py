"""How a chief begins: opening an incarnation, taking over, and initial tokens."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tw_syncrep._replicas.protocol.graph import Publish, SyncState, share_initial_tokens
from tw_syncrep._replicas.protocol.run_table import (
    ReplicaField,
    RunField,
    has_number,
    mark_evicted,
    replica_keys,
    take_number,
)
from tw_syncrep._replicas.protocol.saving import release_holds
from tw_syncrep.cluster._placement import detached_scope, exact_device_scope


def build_open(
    state: SyncState,
    chief: int,
    *,
    initial: tf.Tensor,
    global_step: tf.Variable,
    life: tf.Tensor,
    publish: Publish,
    join: Callable[[], tf.Operation],
) -> tf.Operation:
    """Returns the op that begins an incarnation, and a run if the last has ended.

    It also joins. If a later process has taken the replica's number, nothing begins,
    and joining is refused.
    """
    table = state.table
    # A chief that is gone may still be holding the rounds.
    with tf.control_dependencies([release_holds(table)]):
        baton = table.take_baton()
    with tf.control_dependencies([baton]):
        is_own = has_number(table, chief, life)
        begun = _begin(
            state,
            chief,
            where=is_own,
            initial=initial,
            global_step=global_step,
            publish=publish,
        )
    with tf.control_dependencies([begun]):
        taken = take_number(table, chief, life)
    with tf.control_dependencies([taken]):
        given_back = table.give_back(baton)
    with tf.control_dependencies([given_back]):
        return tf.group(state.wake_queues.wake_all(), join())


def build_claim(state: SyncState, chief: int, *, life: tf.Tensor) -> tf.Tensor:
    """Builds a chief's claim to variables that it will restore; int64 [], 0 if refused.

    No round changes them, and no other replica begins an incarnation, until it opens
    one: a replica that sees values in all could mistake half-restored ones for whole.
    """
    table = state.table
    with tf.control_dependencies([release_holds(table)]):
        baton = table.take_baton()
    with tf.control_dependencies([baton]):
        is_own = has_number(table, chief, life)
        incarnation = table.read([RunField.INCARNATION])[0]
        rows = {RunField.INCARNATION: -tf.abs(incarnation), RunField.CHIEF: chief}
        written = [table.write(rows, where=is_own), take_number(table, chief, life)]
    with tf.control_dependencies(written):
        given_back = table.give_back(baton)
    with tf.control_dependencies([given_back]):
        return tf.cast(is_own, tf.int64)


def build_take_over(
    state: SyncState,
    replica: int,
    *,
    position: tf.Tensor,
    whom: tf.Tensor,
    initial: tf.Tensor,
    global_step: tf.Variable,
    publish: Publish,
) -> tf.Tensor:
    """Builds the take-over by which a replica becomes the chief in the middle of a run.

    It succeeds if ``position``, by which the replica judged the chief lost, is still
    current. The replica does not join again: its step is to see the new incarnation. If
    the chief may be saving, its hold must be released first.
    """
    table = state.table
    baton = table.take_baton()
    with tf.control_dependencies([baton]):
        now = table.read([RunField.ROUND, RunField.INCARNATION, RunField.RUN])
        is_open = tf.equal(table.read([RunField.CLOSED])[0], 0)
        is_same = tf.reduce_all(tf.equal(now[:2], position))
        is_due = is_same & is_open & (now[1] > 0)
        begun = _begin(
            state,
            replica,
            where=is_due,
            initial=initial,
            global_step=global_step,
            publish=publish,
        )
    with tf.control_dependencies([begun]):
        evicted = mark_evicted(table, is_due & (whom > 0), run=now[2])
    with tf.control_dependencies([evicted]):
        incarnation = table.read([RunField.INCARNATION])[0]
        given_back = table.give_back(baton)
    with tf.control_dependencies([given_back, incarnation]):
        woken = state.wake_queues.wake_all()
    with tf.control_dependencies([woken]):
        return tf.stack([incarnation, tf.cast(is_due, tf.int64)])


def _begin(
    state: SyncState,
    chief: int,
    *,
    where: tf.Tensor,
    initial: tf.Tensor,
    global_step: tf.Variable,
    publish: Publish,
) -> tf.Operation:
    """Returns the op that begins an incarnation, under the baton.

    Nothing interrupted earlier reaches into it. A round that was cut off while its
    means were being applied counts as over: its gradients are not applied twice,
    though some variables may have missed them. Initial tokens are written with the
    incarnation, because replicas begin their steps when they see it.
    """
    table = state.table
    # Only the holder of the baton adds gradients, so any that are there are left over.
    cleared = [op for payload in state.payloads for op in payload.clear()]
    with tf.control_dependencies([*cleared, publish(tf.no_op())]):
        before = table.read(list(RunField))
    changing = before[RunField.CHANGING]
    is_cut_off = changing > 0
    first = tf.where(is_cut_off, changing, before[RunField.ROUND])
    cut_off = before[RunField.CUT_OFF] + tf.cast(is_cut_off, tf.int64)
    step = global_step.read_value()
    now = table.now()
    rows = {
        RunField.ROUND: first,
        RunField.INCARNATION: tf.maximum(now, tf.abs(before[RunField.INCARNATION]) + 1),
        RunField.BEGUN_AT: now,
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
    return table.write(rows, where=where)


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
    """Makes a ``QueueRunner`` of the chief's rounds; ending it closes the queues."""
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
