"""Broadcast of one rank's variables, at the start and after a restore."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import tw_ranks
from tw_core.internal import builds_session_graph, without_autograph
from tw_horovod._state.group import find_group, global_process_set
from tw_ranks.internal import read_variable

v1 = tf.compat.v1


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: Any = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Sends the values of one rank's variables to all ranks.

    Each rank gets its own random states of Keras layers, derived from the root's.

    Args:
      variables: TensorFlow variables, resource or reference, or Keras variables; the
        same on all ranks, in the same order.
      root_rank: the rank whose values are sent.
      process_set: all ranks.
      inplace: changes nothing.

    Returns:
      In a session graph, the op that broadcasts; otherwise None, once that is done.

    Raises:
      ValueError: unknown shapes, strings, a root that is not a rank, or variables that
        differ from another rank's.
    """
    group = find_group(process_set)
    return tw_ranks.broadcast_variables(list(variables), group=group, root=root_rank)


@without_autograph
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> list[tf.Tensor]:
    """Broadcasts as ``broadcast_variables`` does, and returns the values.

    ``name`` changes nothing.
    """
    own = list(variables)
    done = broadcast_variables(own, root_rank, process_set)
    with tf.control_dependencies([] if done is None else [done]):
        return list(map(read_variable, own))


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Sends the values of one rank's global variables to all, in a session graph.

    Args:
      root_rank: the rank whose values are sent.

    Returns:
      The op that broadcasts.

    Raises:
      RuntimeError: no session graph is being built.
      ValueError: as in ``broadcast_variables``.
    """
    if not builds_session_graph():
        raise RuntimeError(
            "broadcast_global_variables: global variables are a session graph's; "
            "call broadcast_variables(model.variables, root_rank) instead."
        )
    return broadcast_variables(v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(v1.train.SessionRunHook):  # type: ignore[misc,name-defined]
    """Sends one rank's global variables to all ranks, once they are initialized.

    For a ``MonitoredTrainingSession``, even if the root has restored a checkpoint. List
    it after hooks that restore in ``after_create_session``, and before those that read
    the global step there, such as a ``StopAtStepHook`` with ``num_steps``.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        """Sets the root.

        Args:
          root_rank: the rank whose values are sent.
          device: changes nothing.
        """
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.bcast_op: tf.Operation | None = None

    def begin(self) -> None:
        """Makes the op, once per graph."""
        graph = v1.get_default_graph()
        if self.bcast_op is None or self.bcast_op.graph is not graph:
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs the op."""
        session.run(self.bcast_op)
