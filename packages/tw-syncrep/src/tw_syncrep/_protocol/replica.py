"""A replica's own part: where it is, and its copies of the parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from tw_syncrep._exact_device_scope import detached_scope, exact_device_scope
from tw_syncrep.cluster._parameter_cache import (
    CachedParameter,
    cached_parameters,
    refresh,
)


@dataclass(frozen=True)
class Replica:
    """One replica's part of the graph.

    Attributes:
      index: its number.
      device: of the worker.
      position: local variable, int64 [2]: round and incarnation it computes for.
      local_step: local variable, []: the global step that it computes for, under
        TensorFlow's name and dtype, for those who look there.
      cached: its copies of the parameters that the optimizer changes.
      below_bytes: a smaller parameter is pulled in a pack with others.
    """

    index: int
    device: str
    position: tf.Variable
    local_step: tf.Variable
    cached: tuple[CachedParameter, ...]
    below_bytes: int

    def continue_at(self, progress: tf.Tensor) -> tf.Operation:
        """Returns the op that records where the replica is and pulls parameters.

        Args:
          progress: int64 [3 or more]: round, incarnation, global step; on the run
            table's server.
        """
        pulled = refresh(self.cached, after=progress, below_bytes=self.below_bytes)
        with exact_device_scope(self.device):
            progress = tf.identity(progress)
            step = tf.cast(progress[2], self.local_step.dtype)
            # Last: the watchdog takes the position for a sign that all has arrived.
            with tf.control_dependencies([pulled]):
                return tf.group(
                    self.position.assign(progress[:2], read_value=False),
                    self.local_step.assign(step, read_value=False),
                )


def make_replica(
    index: int,
    variables: Sequence[tf.Variable],
    *,
    step_dtype: tf.DType,
    name: str,
    below_bytes: int,
) -> Replica:
    """Makes the local state of a replica on the current device."""
    device = tf.no_op(name="worker").device
    with detached_scope(), tf.device(device):
        start = tf.zeros([2], tf.int64)
        position = _local_variable(start, f"{name}/replica_{index}/place")
        local_step = _local_variable(tf.zeros([], step_dtype), "sync_rep_local_step")
    names = {variable.name for variable in variables}
    cached = [found for found in cached_parameters() if found.master.name in names]
    return Replica(index, device, position, local_step, tuple(cached), below_bytes)


def _local_variable(start: tf.Tensor, name: str) -> tf.Variable:
    return tf.compat.v1.Variable(
        start,
        trainable=False,
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
        name=name,
        use_resource=True,
    )
