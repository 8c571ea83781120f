"""What one ``apply_gradients`` puts into the graph, as optimizer and hook run it."""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf


@dataclass(frozen=True)
class LifecycleOps:
    """What runs around the steps.

    Attributes:
      join: before a replica's first step: it continues where the run stands.
      open: the chief's, before its first round: begins an incarnation and joins it.
      initial: int64 [R], feeds ``open`` with each replica's initial tokens; none
        by default.
      leave: a replica's that has no more data.
      close: ends the run for all; the chief's, at an orderly end.
      heartbeat: records that the replica lives.
      wake: wakes the replica's own training op, in the wait that ``position`` names.
      position: int64 [2], feeds ``wake`` with the round and incarnation of a wait;
        by default those that the replica computes for.
      status: int64 vectors that ``read_status`` understands.
    """

    join: tf.Operation
    open: tf.Operation
    initial: tf.Tensor
    leave: tf.Operation
    close: tf.Operation
    heartbeat: tf.Operation
    wake: tf.Operation
    position: tf.Tensor
    status: Sequence[tf.Tensor]


@dataclass(frozen=True)
class SyncGraph:
    """One replica's part of the graph, and the chief's round.

    Attributes:
      replica: this replica's number.
      replicas: how many there are.
      aggregate: gradients that make a step.
      train_op: the replica's step.
      reply: what the step returns, int64 [4]: round, incarnation, global step and
        ``WakeReason``.
      position: local variable, int64 [2]: round and incarnation that the replica
        computes for.
      round_op: one round of the chief.
      uninitialized: names of global variables without a value, string [*].
      ops: everything around the steps.
    """

    replica: int
    replicas: int
    aggregate: int
    train_op: tf.Operation
    reply: tf.Tensor
    position: tf.Variable
    round_op: tf.Operation
    uninitialized: tf.Tensor
    ops: LifecycleOps
