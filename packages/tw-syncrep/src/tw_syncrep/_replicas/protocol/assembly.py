"""Puts everything that one ``apply_gradients`` needs into the graph.

The table records the replicas of a run, which leave it, are evicted, end it, and show
that they are alive; a round waits for those that have not left.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core.flat_variables import slots_like_parts
from tw_core.gradients import with_unique_rows
from tw_syncrep._replicas.protocol.chief import build_claim, build_open, build_take_over
from tw_syncrep._replicas.protocol.graph import (
    LifecycleOps,
    SyncGraph,
    SyncState,
    make_state,
)
from tw_syncrep._replicas.protocol.replica import (
    Replica,
    build_join,
    build_step,
    make_replica,
)
from tw_syncrep._replicas.protocol.round import Apply, build_round
from tw_syncrep._replicas.protocol.run_table import (
    ReplicaField,
    RunField,
    draw_life,
    mark_evicted,
    replica_key,
    ring_keys,
    run_mark,
)
from tw_syncrep._replicas.protocol.saving import build_hold
from tw_syncrep._replicas.transfer.payload import SyncOptions
from tw_syncrep.cluster._placement import detached_scope, exact_device_scope


def build_leave(state: SyncState, replica: int) -> tf.Operation:
    """Returns the op with which a replica leaves the run it joined, ended or not."""
    table = state.table
    joined = table.read_of(replica, ReplicaField.JOINED)[0]
    rows = {ReplicaField.HEARD: table.now(), ReplicaField.LEFT: joined}
    left = table.write_of(replica, rows)
    with tf.control_dependencies([left]):
        return state.notify_chief(replica)


def build_evict(
    state: SyncState, replica: int, *, position: tf.Tensor, whom: tf.Tensor
) -> tf.Operation:
    """Returns the op after which the round at ``position`` stops waiting for ``whom``.

    Nothing happens if the round is over, or to replicas that have arrived since.
    """
    table = state.table
    baton = table.take_baton()  # If several evict at once, one counts.
    with tf.control_dependencies([baton]):
        now = table.read([RunField.ROUND, RunField.INCARNATION, RunField.RUN])
        is_due = tf.reduce_all(tf.equal(now[:2], position))
        missing = tf.logical_not(_have_arrived(state, position))
        out = tf.logical_and(tf.logical_and(is_due, whom > 0), missing)
        written = mark_evicted(table, out, run=now[2])
    with tf.control_dependencies([written]):
        given_back = table.give_back(baton)
    with tf.control_dependencies([given_back]):
        return state.notify_chief(replica)


def build_close(state: SyncState, replica: int) -> tf.Operation:
    """Returns the op with which a replica ends the run it joined, but no later one."""
    table = state.table
    joined = replica_key(replica, ReplicaField.JOINED)
    baton = table.take_baton()  # No other run begins in between.
    with tf.control_dependencies([baton]):
        rows = table.read([joined, RunField.RUN, RunField.CLOSED])
    is_own = tf.cast(tf.equal(rows[0], run_mark(rows[1])), tf.int64)
    closed = table.write({RunField.CLOSED: tf.maximum(is_own, rows[2])})
    with tf.control_dependencies([closed]):
        given_back = table.give_back(baton)
    with tf.control_dependencies([given_back]):
        return state.wake_queues.wake_all()


def build_heartbeat(state: SyncState, replica: int) -> tf.Operation:
    """Returns the op that records that the replica is alive."""
    now = state.table.now()
    return state.table.write_of(replica, {ReplicaField.HEARD: now})


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


_NAMES = "tw_syncrep_optimizers"


def build_sync_graph(
    grads: Sequence[Any],
    variables: Sequence[tf.Variable],
    options: SyncOptions,
    *,
    weight: Any,
    global_step: tf.Variable,
    replica_index: int,
    apply: Apply,
    name: str,
) -> SyncGraph:
    """Builds a replica's step, the chief's round and the ops around them."""
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
        train_op, reply = build_step(state, replica, by_index, weight)
    with tf.name_scope(f"{name}/round/"):
        round_op, incarnation = build_round(
            state, apply, global_step=global_step, publish=replica.pulling.publish
        )
    uninitialized = _report_uninitialized()
    with tf.name_scope(f"{name}/session/"):
        ops = _build_lifecycle_ops(state, replica, global_step=global_step)
    return SyncGraph(
        state=state,
        replica=replica_index,
        train_op=train_op,
        reply=reply,
        position=replica.position,
        session=replica.session,
        stamp=replica.stamp,
        round_op=round_op,
        incarnation=incarnation,
        holding=build_hold(state.table),
        uninitialized=uninitialized,
        ops=ops,
    )


def apply_with(
    opt: Any,
    variables: Sequence[tf.Variable],
    *,
    global_step: tf.Variable,
    then: Callable[[], Any] | None,
) -> Apply:
    """Returns a function that applies a round's means with ``opt``, then ``then``."""

    def apply(means: dict[int, Any]) -> Any:
        # TensorFlow's own class adds up rows of equal index itself; others may not.
        if not isinstance(opt, tf.compat.v1.train.Optimizer):
            with tf.device(None):  # on the means' own devices
                means = {n: with_unique_rows(mean) for n, mean in means.items()}
        pairs = [(means.get(n), variable) for n, variable in enumerate(variables)]
        with (
            exact_device_scope(global_step.device),
            tf.compat.v1.name_scope(""),
            slots_like_parts(variables),
        ):
            update = opt.apply_gradients(pairs, global_step)
            if then is None:
                return update
            with tf.control_dependencies([update]):
                return then()

    return apply


def _build_lifecycle_ops(
    state: SyncState, replica: Replica, *, global_step: tf.Variable
) -> LifecycleOps:
    """Builds the ops, detached from the caller's devices and control inputs."""
    with detached_scope(), exact_device_scope(state.table.device):
        with exact_device_scope(replica.device):
            own = replica.position.read_value()
        position = tf.compat.v1.placeholder_with_default(own, [2], name="place")
        none = tf.zeros([state.replicas], tf.int64)
        initial = tf.compat.v1.placeholder_with_default(
            none, [state.replicas], name="initial"
        )
        whom = tf.compat.v1.placeholder_with_default(
            none, [state.replicas], name="whom"
        )
        no_life = tf.zeros([], tf.int64)
        life = tf.compat.v1.placeholder_with_default(no_life, [], name="life")
        join = partial(build_join, state, replica, global_step=global_step, life=life)
        return LifecycleOps(
            join=join(),
            open=build_open(
                state,
                replica.index,
                initial=initial,
                global_step=global_step,
                life=life,
                publish=replica.pulling.publish,
                join=join,
            ),
            take_over=build_take_over(
                state,
                replica.index,
                position=position,
                whom=whom,
                initial=initial,
                global_step=global_step,
                publish=replica.pulling.publish,
            ),
            initial=initial,
            claim=build_claim(state, replica.index, life=life),
            draw=draw_life(state.table, replica.index),
            life=life,
            leave=build_leave(state, replica.index),
            evict=build_evict(state, replica.index, position=position, whom=whom),
            whom=whom,
            close=build_close(state, replica.index),
            heartbeat=build_heartbeat(state, replica.index),
            wake=state.wake_queues.wake(replica.index, position),
            position=position,
            status=_status_parts(state, global_step),
        )


def _status_parts(state: SyncState, global_step: tf.Variable) -> list[tf.Tensor]:
    """Reads the whole table, in the parts that ``read_status`` takes."""
    table, replicas = state.table, state.replicas
    step = tf.reshape(tf.cast(global_step.read_value(), tf.int64), [1])
    about_run = tf.concat(
        [table.read(list(RunField)), tf.reshape(table.now(), [1]), step], axis=0
    )
    about_replicas = table.read_fields(replicas, *ReplicaField)
    about_replicas.append(tf.constant(state.quota, tf.int64))
    return [about_run, tf.stack(about_replicas), table.read(ring_keys())]


def _report_uninitialized() -> tf.Tensor:
    with detached_scope():
        # Without the identity, TensorFlow complains that the result is never used.
        return tf.identity(
            tf.compat.v1.report_uninitialized_variables(tf.compat.v1.global_variables())
        )


def _unique_name(name: str) -> str:
    """Numbers the optimizers of one name in a graph, so that they share no queue."""
    taken = tf.compat.v1.get_collection_ref(_NAMES)
    taken.append(name)
    count = taken.count(name)
    return name if count == 1 else f"{name}_{count - 1}"
