"""A session configuration in which sums over towers keep their speed and bits.

TensorFlow's memory pass rewrites large sums of several towers into temporaries
and single additions, which on CPU devices takes twice the time and is not
reproducible; ``docs/design/tensorflow.md`` has the figures.
"""

import tensorflow as tf

from tw_core.checks import check_flag, check_whole_number
from tw_core.devices._known import count_logical_devices


def session_config(
    *, num_cpus: int | None = None, soft_placement: bool = True
) -> tf.compat.v1.ConfigProto:
    """Makes the configuration recommended for sessions that run towers.

    Args:
      num_cpus: logical CPU devices of the session; None leaves TensorFlow's
        own number, which is 1 unless ``use_logical_cpus`` said otherwise.
      soft_placement: whether an op without a kernel for its device may move
        to another one, as v1 code with integer variables on GPUs needs.

    Returns:
      A fresh ``ConfigProto``: memory pass off, GPU memory taken as needed.

    Raises:
      ValueError: ``num_cpus`` is below 1.
      TypeError: ``num_cpus`` is no whole number, or ``soft_placement`` no bool.
    """
    if num_cpus is not None:
        check_whole_number("session_config", num_cpus=num_cpus, at_least=1)
    check_flag("session_config", soft_placement=soft_placement)
    config = tf.compat.v1.ConfigProto(allow_soft_placement=soft_placement)
    config.gpu_options.allow_growth = True
    rewrites = config.graph_options.rewrite_options
    rewrites.memory_optimization = rewrites.NO_MEM_OPT
    config.device_count["CPU"] = num_cpus or count_logical_devices("CPU")
    return config
