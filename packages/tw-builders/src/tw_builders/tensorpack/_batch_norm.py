"""tensorpack's ``BatchNorm(sync_statistics="nccl")`` over our towers, on any device.

tensorpack adds the towers' moments with NCCL, which weights all towers equally, and its
own source warns of wrong results from TensorFlow 1.15 on.
"""

from collections.abc import Sequence

import tensorflow as tf

from tw_core.internal import check_list
from tw_core.synchronized import moments_over_towers


def get_sync_bn_mean_var(
    inputs: tf.Tensor, red_axis: Sequence[int], sync_statistics: str
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes a batch's moments over all towers; replaces tensorpack's function.

    ``BatchNorm`` uses it after::

        import tensorpack.models.batch_norm as layer

        layer.get_sync_bn_mean_var = tw_builders.tensorpack.get_sync_bn_mean_var

    Towers are weighted by their rows, and may have none.

    Args:
      inputs: a tower's floating-point tensor.
      red_axis: axes to reduce.
      sync_statistics: ``"nccl"``, whatever the devices are.

    Returns:
      Mean and variance.

    Raises:
      ValueError: another ``sync_statistics``, such as ``"horovod"``; or axes out of
        range.
      TypeError: arguments of another type.
      RuntimeError: as ``tw_core.synchronized.sum_over_towers``.
    """
    if sync_statistics != "nccl":
        raise ValueError(
            "get_sync_bn_mean_var: BatchNorm is synchronised over the towers of a "
            f"process by sync_statistics='nccl'; got {sync_statistics!r}."
        )
    check_list(red_axis=red_axis, of="axes")
    return moments_over_towers(inputs, red_axis)
