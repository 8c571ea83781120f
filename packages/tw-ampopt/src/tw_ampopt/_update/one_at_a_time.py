"""A part of a step that threads enter one after the other.

Adding to accumulators, counting, and emptying them are many reads and writes. A second
step in between, from another thread or another call in flight, would lose gradients.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tw_core import compiles_with_xla


def one_at_a_time(
    body: Callable[[], tf.Tensor],
    *,
    mutex: str,
    device: str,
    after: Sequence[tf.Tensor],
) -> tf.Tensor:
    """Builds ``body`` so that it runs while no other one of the same mutex does.

    A body that fails lets the next one in. XLA has no mutex and needs none: it locks
    the variables that a compiled function changes for as long as that runs.

    Args:
      body: returns a tensor; its effects have happened when that is known.
      mutex: name; the same wherever one waits for the other.
      device: of the mutex, a CPU.
      after: what must be known before anything waits, so that this is computed at
        the same time as other bodies run.
    """
    if compiles_with_xla():
        return body()
    with tf.device(device or None), tf.control_dependencies(after):
        # Made where it is used, and found by its name: a function that captured it
        # could not be exported.
        handle = tf.raw_ops.MutexV2(shared_name=mutex)
        lock = tf.raw_ops.MutexLock(mutex=handle)
    if tf.executing_eagerly():
        try:
            return body()
        finally:
            del lock  # an exception's traceback would hold it
    with tf.control_dependencies([lock]):
        result = body()
    with tf.device(device or None), tf.control_dependencies([result]):
        opened = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
    with tf.control_dependencies([opened]):
        return tf.identity(result)
