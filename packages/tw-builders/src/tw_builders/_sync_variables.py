"""Copying every variable of tower 0 to the replicas, optimizer state included.

Run it once after the initialisers and after a checkpoint is restored: then all
replicas hold the same, and equal updates keep them equal.
"""

import logging

import tensorflow as tf

from tw_builders._sync_plan import VariableFacts, plan_sync

_log = logging.getLogger("tw_builders")


def build_sync_op() -> tf.Operation:
    """Builds the op that copies tower 0's variables in the default graph.

    Variables of towers 1 and up that have no counterpart are named in the log.

    Raises:
      ValueError: a trainable variable has no counterpart.
    """
    variables = [*tf.compat.v1.global_variables(), *tf.compat.v1.local_variables()]
    plan = plan_sync([_facts(variable) for variable in variables])
    _report([variables[i] for i in plan.unmatched])
    values: dict[int, tf.Tensor] = {}
    assigns = []
    with tf.name_scope("sync_variables"):
        for source, target in plan.copies:
            if source not in values:
                with tf.device(variables[source].device):
                    values[source] = variables[source].read_value()
            with tf.device(variables[target].device):
                assigns.append(
                    variables[target].assign(values[source], read_value=False)
                )
        return tf.group(*assigns, name="from_tower0")


class SyncVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Runs the sync op whenever a session was made or recovered.

    For ``tf.compat.v1.train.MonitoredTrainingSession``, which initialises or
    restores variables first.
    """

    def __init__(self, sync_op: tf.Operation | None) -> None:
        """Takes the op that ``SyncMultiGPUReplicatedBuilder.build`` returned."""
        self._sync_op = sync_op

    def after_create_session(
        self, session: tf.compat.v1.Session, coord: object
    ) -> None:
        """Copies tower 0's variables to the replicas."""
        del coord
        if self._sync_op is not None:
            session.run(self._sync_op)


def _facts(variable: tf.Variable) -> VariableFacts:
    return VariableFacts(
        variable.name, str(variable.shape), variable.dtype.base_dtype.name
    )


def _report(unmatched: list[tf.Variable]) -> None:
    if not unmatched:
        return
    trainable = {id(variable) for variable in tf.compat.v1.trainable_variables()}
    fatal = [v.name for v in unmatched if id(v) in trainable]
    if fatal:
        raise ValueError(
            f"sync_variables: tower 0 has no counterpart of the trainable variables "
            f"{fatal}, by name, shape and dtype; build the same model in every tower."
        )
    _log.warning(
        "sync_variables: tower 0 has no counterpart of %s; they keep their own values.",
        [v.name for v in unmatched],
    )
