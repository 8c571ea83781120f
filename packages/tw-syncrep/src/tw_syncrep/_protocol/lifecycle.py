"""The ops around a run's steps: how replicas leave it, and how a chief begins.

Replicas record in the table that they are alive, leave, are evicted or end the run; a
round waits for those that have not left.

While the chief saves, rounds are held, so that no checkpoint mixes two steps: with
backups, they go on while the chief is busy. A hold is a call that takes the baton and
keeps it until it is released; a round that is ready waits until then. Holds and
releases are numbered as they are requested, on the table's server: a release ends every
hold requested before it.
"""

from typing import Any

import tensorflow as tf

from tw_syncrep._parameters.placement import detached_scope, exact_device_scope
from tw_syncrep._protocol.graph import LifecycleOps, SyncState, share_initial_tokens
from tw_syncrep._protocol.replica import Replica, build_join
from tw_syncrep._protocol.run_table import (
    ReplicaField,
    RunField,
    RunTable,
    draw_life,
    has_number,
    mark_evicted,
    replica_key,
    replica_keys,
    ring_keys,
    run_mark,
    take_number,
)


def build_lifecycle_ops(state: SyncState, replica: Replica) -> LifecycleOps:
    """Builds the ops, detached and on the table's device."""
    table, own = state.table, replica.index
    with exact_device_scope(replica.device):
        place = replica.position.read_value()
    none = tf.zeros([state.replicas], tf.int64)
    position, initial, whom, life = (
        tf.compat.v1.placeholder_with_default(default, default.shape, name=name)
        for name, default in (
            ("place", place),
            ("initial", none),
            ("whom", none),
            ("life", tf.zeros([], tf.int64)),
        )
    )
    hold, held = _build_hold(table)
    return LifecycleOps(
        join=build_join(state, replica, life),
        open=_build_open(state, replica, initial=initial, life=life),
        take_over=_build_take_over(
            state, replica, position=position, whom=whom, initial=initial
        ),
        initial=initial,
        claim=_build_claim(state, own, life),
        draw=draw_life(table, own),
        life=life,
        leave=_build_leave(state, own),
        evict=_build_evict(state, own, position=position, whom=whom),
        whom=whom,
        close=_build_close(state, own),
        heartbeat=table.write_of(own, {ReplicaField.HEARD: table.now()}),
        wake=state.wake_queues.wake(own, position),
        position=position,
        status=_status_parts(state),
        next_hold=table.read([RunField.DRAWN])[0] + 1,
        hold=hold,
        held=held,
        release=_release_holds(table),
    )


def _build_open(
    state: SyncState, replica: Replica, *, initial: tf.Tensor, life: tf.Tensor
) -> tf.Operation:
    """Returns the op that begins an incarnation, and a run if the last has ended.

    It also joins the run. If a later process has taken the replica's number, nothing
    begins, and joining is refused.
    """
    table = state.table
    # A dead chief may still be holding the rounds.
    with tf.control_dependencies([_release_holds(table)]):
        baton = table.take_baton()
    with tf.control_dependencies([baton]):
        is_own = has_number(table, replica.index, life)
        begun = _begin(state, replica, where=is_own, initial=initial)
    with tf.control_dependencies([begun]):
        taken = take_number(table, replica.index, life)
    given_back = table.give_back(baton, after=[taken])
    with tf.control_dependencies([given_back]):
        woken = state.wake_queues.wake_all()
        return tf.group(woken, build_join(state, replica, life))


def _build_claim(state: SyncState, chief: int, life: tf.Tensor) -> tf.Tensor:
    """Builds a chief's claim to variables that it will restore; int64 [], 0 if refused.

    Until the chief opens an incarnation, no round changes them, and no other replica
    opens one: if all have values, it could mistake half a restore for a complete one.
    """
    table = state.table
    with tf.control_dependencies([_release_holds(table)]):
        baton = table.take_baton()
    with tf.control_dependencies([baton]):
        is_own = has_number(table, chief, life)
        incarnation = table.read([RunField.INCARNATION])[0]
        rows = {RunField.INCARNATION: -tf.abs(incarnation), RunField.CHIEF: chief}
        written = [table.write(rows, where=is_own), take_number(table, chief, life)]
    given_back = table.give_back(baton, after=written)
    with tf.control_dependencies([given_back]):
        return tf.cast(is_own, tf.int64)


def _build_take_over(
    state: SyncState,
    replica: Replica,
    *,
    position: tf.Tensor,
    whom: tf.Tensor,
    initial: tf.Tensor,
) -> tf.Tensor:
    """Builds the take-over by which a replica becomes the chief in the middle of a run.

    It succeeds if ``position``, by which the replica judged the chief lost, is still
    current. The replica does not join again: its step must see the new incarnation. If
    the chief may be saving, its hold must be released first.
    """
    table = state.table
    baton = table.take_baton()
    with tf.control_dependencies([baton]):
        now = table.read([RunField.ROUND, RunField.INCARNATION, RunField.RUN])
        is_open = tf.equal(table.read([RunField.CLOSED])[0], 0)
        is_same = tf.reduce_all(tf.equal(now[:2], position))
        is_due = is_same & is_open & (now[1] > 0)
        begun = _begin(state, replica, where=is_due, initial=initial)
    with tf.control_dependencies([begun]):
        evicted = mark_evicted(table, is_due & (whom > 0), run=now[2])
    with tf.control_dependencies([evicted]):
        incarnation = table.read([RunField.INCARNATION])[0]
    given_back = table.give_back(baton, after=[incarnation])
    with tf.control_dependencies([given_back]):
        woken = state.wake_queues.wake_all()
    with tf.control_dependencies([woken]):
        return tf.stack([incarnation, tf.cast(is_due, tf.int64)])


def _begin(
    state: SyncState, replica: Replica, *, where: tf.Tensor, initial: tf.Tensor
) -> tf.Operation:
    """Returns the op that begins an incarnation, under the baton.

    Ops interrupted earlier cannot affect it. A round that was cut off while its means
    were being applied counts as over: its gradients are not applied twice, though some
    variables may have missed them. Initial tokens are written with the incarnation,
    because replicas begin their steps when they see it.
    """
    table = state.table
    # Only the holder of the baton adds gradients, so any that are left are stale.
    cleared = [op for payload in state.payloads for op in payload.clear()]
    published = replica.pulling.publish(tf.no_op())
    with tf.control_dependencies([*cleared, published]):
        before = table.read(list(RunField))
    changing = before[RunField.CHANGING]
    is_cut_off = changing > 0
    first = tf.where(is_cut_off, changing, before[RunField.ROUND])
    cut_off = before[RunField.CUT_OFF] + tf.cast(is_cut_off, tf.int64)
    step = state.global_step.read_value()
    now = table.now()
    rows = {
        RunField.ROUND: first,
        RunField.INCARNATION: tf.maximum(now, tf.abs(before[RunField.INCARNATION]) + 1),
        RunField.BEGUN_AT: now,
        RunField.CHANGING: 0,
        RunField.CUT_OFF: cut_off,
        RunField.CLOSED: 0,
        RunField.CHIEF: replica.index,
        RunField.FIRST_ROUND: first,
        RunField.RUN: before[RunField.RUN] + before[RunField.CLOSED],
        RunField.STEP: step,
        RunField.FIRST_STEP: step,
    }
    tokens = [(replica_keys(state.replicas, ReplicaField.INITIAL), initial)]
    return table.write([*rows.items(), *tokens], where=where)


def _build_leave(state: SyncState, replica: int) -> tf.Operation:
    """Returns the op by which a replica leaves the run it joined, ended or not."""
    table = state.table
    joined = table.read_of(replica, ReplicaField.JOINED)[0]
    rows = {ReplicaField.HEARD: table.now(), ReplicaField.LEFT: joined}
    with tf.control_dependencies([table.write_of(replica, rows)]):
        incarnation = table.read([RunField.INCARNATION])[0]
        return state.arrivals.notify(replica, incarnation)


def _build_evict(
    state: SyncState, replica: int, *, position: tf.Tensor, whom: tf.Tensor
) -> tf.Operation:
    """Returns the op after which the round at ``position`` stops waiting for ``whom``.

    Nothing happens if the round is over, or to replicas that have arrived since.
    """
    table = state.table
    baton = table.take_baton()  # If several evict at once, only one counts.
    with tf.control_dependencies([baton]):
        now = table.read([RunField.ROUND, RunField.INCARNATION, RunField.RUN])
        is_due = tf.reduce_all(tf.equal(now[:2], position))
        missing = tf.logical_not(_have_arrived(state, position))
        written = mark_evicted(table, is_due & (whom > 0) & missing, run=now[2])
    given_back = table.give_back(baton, after=[written])
    with tf.control_dependencies([given_back]):
        return state.arrivals.notify(replica, now[1])


def _have_arrived(state: SyncState, position: tf.Tensor) -> tf.Tensor:
    """Returns which replicas have sent all their gradients of a round, bool [R]."""
    arrived_round, incarnation, arrivals = state.table.read_fields(
        state.replicas,
        ReplicaField.ARRIVED_ROUND,
        ReplicaField.ARRIVED_INCARNATION,
        ReplicaField.ARRIVALS,
    )
    in_round = tf.equal(arrived_round, position[0])
    in_incarnation = tf.equal(incarnation, position[1])
    have_all = arrivals >= tf.constant(state.quota, tf.int64)
    return in_round & in_incarnation & have_all


def _build_close(state: SyncState, replica: int) -> tf.Operation:
    """Returns the op by which a replica ends the run it joined, but no later one."""
    table = state.table
    joined = replica_key(replica, ReplicaField.JOINED)
    baton = table.take_baton()  # No other run begins in between.
    with tf.control_dependencies([baton]):
        rows = table.read([joined, RunField.RUN, RunField.CLOSED])
    is_own = tf.cast(tf.equal(rows[0], run_mark(rows[1])), tf.int64)
    closed = table.write({RunField.CLOSED: tf.maximum(is_own, rows[2])})
    given_back = table.give_back(baton, after=[closed])
    with tf.control_dependencies([given_back]):
        return state.wake_queues.wake_all()


def _build_hold(table: RunTable) -> tuple[tf.Operation, tf.Tensor]:
    """Builds the op that holds the rounds, and the number of the last hold."""
    number = table.draw_number()
    with tf.control_dependencies([number]):
        baton = table.take_baton()
    with tf.control_dependencies([baton]):
        begun = table.write({RunField.HELD: number})
    queue = _releases(table)
    with tf.control_dependencies([begun]):
        (token,) = tf.while_loop(
            lambda token: token < number,
            lambda _: [queue.dequeue()],
            [tf.constant(0, tf.int64)],
            parallel_iterations=1,
        )
    return table.give_back(baton, after=[token]), table.read([RunField.HELD])[0]


def _release_holds(table: RunTable) -> tf.Operation:
    """Returns the op that ends all holds requested before."""
    return _releases(table).enqueue(table.draw_number())


def _releases(table: RunTable) -> tf.queue.QueueBase:
    name = f"{table.baton}/releases"
    return tf.queue.FIFOQueue(-1, [tf.int64], [[]], shared_name=name, name="releases")


def _status_parts(state: SyncState) -> list[tf.Tensor]:
    """Reads the whole table, in the parts that ``read_status`` takes."""
    table = state.table
    step = tf.reshape(tf.cast(state.global_step.read_value(), tf.int64), [1])
    about_run = tf.concat(
        [table.read(list(RunField)), tf.reshape(table.now(), [1]), step], axis=0
    )
    about_replicas = table.read_fields(state.replicas, *ReplicaField)
    about_replicas.append(tf.constant(state.quota, tf.int64))
    return [about_run, tf.stack(about_replicas), table.read(ring_keys())]


def build_initial_tokens_op(state: SyncState, num_tokens: int) -> tf.Operation:
    """Returns the op that gives out initial tokens; see ``share_initial_tokens``."""
    counts = share_initial_tokens(state, num_tokens)
    keys = replica_keys(state.replicas, ReplicaField.INITIAL)
    with detached_scope(), exact_device_scope(state.table.device):
        given = state.table.write([(keys, counts)])
        with tf.control_dependencies([given]):
            # Replicas that already wait must read the table again.
            return tf.group(state.wake_queues.wake_all(), name="init_tokens")


def make_queue_runner(state: SyncState, round_op: tf.Operation) -> Any:
    """Makes a ``QueueRunner`` for the chief's rounds; ending it closes the queues."""
    queue = state.arrivals.queue
    with detached_scope(), exact_device_scope(state.table.device):
        close = tf.group(queue.close(), state.wake_queues.close())
    return tf.compat.v1.train.QueueRunner(
        queue, [round_op], close_op=close, cancel_op=close
    )
