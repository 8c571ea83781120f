"""Puts everything that one ``apply_gradients`` needs into the graph."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tw_core.flat_variables import slots_like_parts
from tw_core.internal import check_elementwise, with_unique_rows
from tw_syncrep._parameters.placement import detached_scope, exact_device_scope
from tw_syncrep._protocol.graph import SyncGraph, make_state
from tw_syncrep._protocol.lifecycle import build_lifecycle_ops
from tw_syncrep._protocol.replica import build_step, make_replica
from tw_syncrep._protocol.round import Apply, build_round
from tw_syncrep._transfer.payload import SyncOptions

_NAMES = "tw_syncrep_optimizers"


def build_sync_graph(
    grads: Sequence[Any],
    variables: Sequence[tf.Variable],
    options: SyncOptions,
    *,
    weight: Any,
    global_step: tf.Variable,
    replica_index: int,
    opt: Any,
    average: Callable[[], Any] | None,
    name: str,
) -> SyncGraph:
    """Builds a replica's step, the chief's round and the ops around them.

    All but the step is detached from the caller's devices and control inputs.
    """
    name = _unique_name(name)
    device = tf.no_op(name="worker").device
    with detached_scope():
        state = make_state(
            grads, variables, options, global_step=global_step, name=name
        )
        replica = make_replica(
            replica_index,
            variables,
            device=device,
            step_dtype=global_step.dtype.base_dtype,
            name=name,
            below_bytes=options.below_bytes,
        )
    by_index = {n: grad for n, grad in enumerate(grads) if grad is not None}
    with tf.name_scope(f"{name}/step/"):
        reply = build_step(state, replica, by_index, weight)
    with detached_scope():
        with exact_device_scope(state.table.device):
            with tf.name_scope(f"{name}/round/"):
                apply = _apply_with(opt, variables, global_step, average)
                publish = replica.pulling.publish
                round_op, incarnation = build_round(state, apply, publish)
            with tf.name_scope(f"{name}/session/"):
                ops = build_lifecycle_ops(state, replica)
        every = tf.compat.v1.global_variables()
        uninitialized = tf.compat.v1.report_uninitialized_variables(every)
        return SyncGraph(
            state=state,
            replica=replica_index,
            reply=reply,
            position=replica.position,
            session=replica.session,
            stamp=replica.stamp,
            round_op=round_op,
            incarnation=incarnation,
            # Without the identity, TensorFlow complains that it is never used.
            uninitialized=tf.identity(uninitialized),
            ops=ops,
        )


def _apply_with(
    opt: Any,
    variables: Sequence[tf.Variable],
    global_step: tf.Variable,
    average: Callable[[], Any] | None,
) -> Apply:
    """Returns a function that applies a round's means with ``opt``, then averages."""
    check_elementwise(opt, variables)

    def apply(means: dict[int, Any]) -> Any:
        # TensorFlow's own class sums duplicate indices itself; others may not.
        if not isinstance(opt, tf.compat.v1.train.Optimizer):
            with tf.device(None):  # on the means' own devices
                means = {n: with_unique_rows(mean) for n, mean in means.items()}
        pairs = [(means.get(n), variable) for n, variable in enumerate(variables)]
        with tf.compat.v1.name_scope(""), slots_like_parts(variables):
            update = opt.apply_gradients(pairs, global_step)
            if average is None:
                return update
            with tf.control_dependencies([update]):
                return average()

    return apply


def _unique_name(name: str) -> str:
    """Makes an optimizer's name unique in the graph, so that none share a queue."""
    taken = tf.compat.v1.get_collection_ref(_NAMES)
    taken.append(name)
    count = taken.count(name)
    return name if count == 1 else f"{name}_{count - 1}"
