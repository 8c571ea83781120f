"""Making all devices take part in a reduction of which one result is used.

A collective waits until every device has joined. TensorFlow runs only what leads
to a used result, in a session and in a ``tf.function``; so each tower's result
is made to wait for all of the same reduction.
"""

from collections.abc import Sequence

import tensorflow as tf

from tw_reduce._add_columns import host_of


def all_together(sums: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    """Gives the sums again, any of which brings all of them about.

    Args:
      sums: [K] results of one reduction.
      devices: [K] where they lie.
    """
    with tf.device(host_of(devices[0])):
        barrier = tf.group(*sums)
    tied = []
    for total, device in zip(sums, devices, strict=True):
        with tf.device(device), tf.control_dependencies([barrier]):
            tied.append(tf.identity(total))
    return tied


def check_traced(*, caller: str) -> None:
    """Refuses eager calls, in which the first tower would wait for the others.

    Args:
      caller: who refuses; opens the message.

    Raises:
      RuntimeError: called eagerly.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            f"{caller}: called eagerly, where towers run one after the other and the "
            "first would wait for ever. Call it in a tf.function, or use sum_balanced."
        )
