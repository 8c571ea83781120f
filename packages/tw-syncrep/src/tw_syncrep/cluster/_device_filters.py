"""Which other tasks a session sees: the parameter servers, and no replica.

TensorFlow has a session look at every task of the cluster that it may use, so the
death of one replica would concern all sessions.
"""

from typing import Any

import tensorflow as tf

from tw_syncrep._call_checks import check_config, check_task
from tw_syncrep.cluster._tf_config import TaskConfig


def with_device_filters(config: Any, cluster: TaskConfig | None) -> Any:
    """Returns a session config in which a task sees itself and the servers only.

    Args:
      config: a ``ConfigProto`` or None; one with filters is returned as it is.
      cluster: this task; without one nothing is filtered.

    Raises:
      TypeError: an argument is of another type.
    """
    check_config("with_device_filters", config)
    if cluster is not None:
        check_task("with_device_filters", cluster)
    if cluster is None or (config is not None and config.device_filters):
        return config
    filtered = tf.compat.v1.ConfigProto()
    if config is not None:
        filtered.CopyFrom(config)
    filtered.device_filters.extend(
        ["/job:ps", f"/job:{cluster.job}/task:{cluster.index}"]
    )
    return filtered
