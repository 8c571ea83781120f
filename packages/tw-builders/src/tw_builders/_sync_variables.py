"""Copying every variable of tower 0 to the replicas, optimizer state included.

Run it once after the initialisers and after a checkpoint is restored: then all
replicas hold the same, and equal updates keep them equal.
"""

import logging
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_builders._optimizers import as_tf_variable
from tw_builders._sync_plan import VariableFacts, originals_by_name, plan_sync
from tw_core import variable_origin

_log = logging.getLogger("tw_builders")


def build_sync_op(replicas: Sequence[Sequence[Any]] = ()) -> tf.Operation:
    """Builds the op that copies tower 0's variables in the default graph.

    Variables of towers 1 and up that have no counterpart are named in the log.

    Args:
      replicas: [K][N] variables known to be copies of each other, in this order.

    Raises:
      ValueError: a trainable variable has no counterpart.
    """
    variables = [*tf.compat.v1.global_variables(), *tf.compat.v1.local_variables()]
    originals = _originals_of(variables) | _originals_among(replicas)
    plan = plan_sync([_facts(v, originals.get(id(v))) for v in variables])
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
        """Takes the op that ``SyncMultiGPUReplicatedBuilder.build`` returned.

        Raises:
          TypeError: it is neither an op nor None.
        """
        if sync_op is not None and not isinstance(sync_op, tf.Operation | tf.Tensor):
            raise TypeError(
                "SyncVariablesHook: sync_op must be the op that "
                f"SyncMultiGPUReplicatedBuilder.build returned, or None; got "
                f"{sync_op!r}."
            )
        self._sync_op = sync_op

    def after_create_session(
        self, session: tf.compat.v1.Session, coord: object
    ) -> None:
        """Copies tower 0's variables to the replicas.

        Raises:
          TypeError: ``session`` is no session.
        """
        if not callable(getattr(session, "run", None)):
            raise TypeError(
                "SyncVariablesHook.after_create_session: session must be a session; "
                f"got {session!r}."
            )
        del coord
        if self._sync_op is not None:
            session.run(self._sync_op)


def _originals_of(variables: Sequence[tf.Variable]) -> dict[int, str]:
    """Maps the id of each copy to its original's name, by the graph's record."""
    origins = [(variable, variable_origin(variable)) for variable in variables]
    if any(origin is not None for _, origin in origins):
        return {
            id(variable): origin.original
            for variable, origin in origins
            if origin is not None and origin.tower != 0
        }
    return _guessed_originals()


def _guessed_originals() -> dict[int, str]:
    known = {_plain_name(v): v for v in tf.compat.v1.global_variables()}
    local = {_plain_name(v): v for v in tf.compat.v1.local_variables()}
    originals = originals_by_name(list(known), list(local))
    if originals:
        _log.warning(
            "sync_variables: this graph does not tell which tower made a variable, as "
            "one that was imported does not; replicas go by their names: %s.",
            dict(originals),
        )
    named = known | local
    return {id(named[name]): original for name, original in originals.items()}


def _originals_among(replicas: Sequence[Sequence[Any]]) -> dict[int, str]:
    plain = [[as_tf_variable(v) for v in variables] for variables in replicas]
    return {
        id(copy): _plain_name(original)
        for copies in plain[1:]
        for original, copy in zip(plain[0], copies, strict=True)
    }


def _facts(variable: tf.Variable, original: str | None) -> VariableFacts:
    return VariableFacts(
        _plain_name(variable),
        str(variable.shape),
        variable.dtype.base_dtype.name,
        original,
    )


def _plain_name(variable: tf.Variable) -> str:
    return str(variable.name).split(":")[0]


def _report(unmatched: list[tf.Variable]) -> None:
    if not unmatched:
        return
    trainable = {id(variable) for variable in tf.compat.v1.trainable_variables()}
    fatal = [v.name for v in unmatched if id(v) in trainable]
    if fatal:
        raise ValueError(
            f"sync_variables: tower 0 has no counterpart of the trainable variables "
            f"{fatal}, of their shape and dtype; build the same model in every tower."
        )
    _log.warning(
        "sync_variables: tower 0 has no counterpart of %s; they keep their own values.",
        [v.name for v in unmatched],
    )
