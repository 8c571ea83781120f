"""Which replica an optimizer belongs to; read anew in every graph."""

from typing import Any

import tensorflow as tf

from tw_core.checks import check_whole_number
from tw_syncrep.cluster._tf_config import find_tf_config


def check_index(given: Any) -> None:
    """Refuses what is no number of a replica, and not None.

    Raises:
      TypeError: not a whole number.
      ValueError: a negative one.
    """
    if given is not None:
        check_whole_number("SyncReplicasOptimizer", replica_index=given, at_least=0)


def find_replica_index(given: int | None, *, total: int) -> int:
    """Finds a replica's number.

    Args:
      given: what the caller said, if anything.
      total: number of replicas.

    Returns:
      ``given``, else the task of the device in force, else TF_CONFIG's, else 0
      where there is one replica.

    Raises:
      ValueError: there is none, or it is not below ``total``.
    """
    index, source = given, "replica_index="
    if index is None:
        index, source = _from_device(), "the device in force"
    if index is None:
        config = find_tf_config()
        index, source = config.replica_index if config else None, "TF_CONFIG"
    if index is None and total == 1:
        return 0
    if index is None:
        raise ValueError(
            "SyncReplicasOptimizer: cannot tell which replica this is: replica_index= "
            "was not given, no task is in the device in force, and TF_CONFIG names no "
            "replica. Pass replica_index=, or build under tf.device('/job:worker/"
            "task:0')."
        )
    if not 0 <= index < total:
        raise ValueError(
            f"SyncReplicasOptimizer: replica {index} (from {source}) is not one of "
            f"the {total} replicas 0..{total - 1}. Correct it, or total_num_replicas."
        )
    return index


def _from_device() -> int | None:
    """Task of an op that is placed like those of the caller's model."""
    spec = tf.DeviceSpec.from_string(tf.no_op(name="replica").device or "")
    if spec.task is None or spec.job in ("ps", "chief"):
        return None if spec.job == "ps" else spec.task
    # Where the cluster has a chief, it is the first replica, the workers follow.
    config = find_tf_config()
    has_chief = config is not None and bool(config.addresses.get("chief"))
    return int(spec.task) + (spec.job == "worker" and has_chief)
