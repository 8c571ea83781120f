"""Making all devices take part in a reduction of which one result is used.

A collective waits until every device has joined. TensorFlow runs only what leads
to a used result, in a session and in a ``tf.function``; so each tower's result
is made to wait for all of the same reduction.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tw_core import compiles_with_xla
from tw_reduce._devices import host_of


def all_together(sums: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    """Gives the sums again, any of which brings all of them about.

    Args:
      sums: [K] results of one reduction.
      devices: [K] where they lie.
    """
    with tf.device(host_of(devices[0])):
        barrier = tf.group(*sums)
    return after(sums, devices, [barrier])


def in_turn(
    reduce: Callable[[int, Sequence[tf.Tensor]], list[tf.Tensor]],
    columns: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str],
    *,
    lock: str,
) -> list[list[tf.Tensor]]:
    """Reduces, so that steps in several threads do so one after the other.

    They share the graph's keys. In functions the towers of one call would meet
    those of another, and TensorFlow would end all collectives of the process;
    the runs of a session it keeps apart, but not while they look for each other
    for the first time.

    Args:
      reduce: takes n and column n, and gives the K results of their reduction.
      columns: [N][K] dense tensors.
      devices: [K] where they lie.
      lock: a name that nothing but these reductions has.

    Returns:
      [N][K] sums, any of which brings all of them about.
    """
    inputs = [tensor for column in columns for tensor in column]
    with tf.device(host_of(devices[0])):
        mutex = tf.raw_ops.MutexV2(shared_name=lock)
        # Not before all gradients are there: who holds the lock waits for nothing.
        with tf.control_dependencies(inputs):
            held = tf.raw_ops.MutexLock(mutex=mutex)
    waiting = [after(column, devices, [held]) for column in columns]
    sums = [reduce(n, column) for n, column in enumerate(waiting)]
    done = [total for column in sums for total in column]
    with tf.device(host_of(devices[0])), tf.control_dependencies(done):
        released = tf.raw_ops.ConsumeMutexLock(mutex_lock=held)
    return [after(column, devices, [released]) for column in sums]


def after(
    tensors: Sequence[tf.Tensor], devices: Sequence[str], before: Sequence[object]
) -> list[tf.Tensor]:
    """Gives [K] tensors again, each on its device, once some ops have run."""
    tied = []
    for tensor, device in zip(tensors, devices, strict=True):
        with tf.device(device), tf.control_dependencies(before):
            tied.append(tf.identity(tensor))
    return tied


def check_traced(*, caller: str) -> None:
    """Refuses modes in which the towers cannot wait for each other.

    Args:
      caller: who refuses; opens the message.

    Raises:
      RuntimeError: called eagerly, or in what XLA compiles.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            f"{caller}: called eagerly, where towers run one after the other and the "
            "first would wait for ever. Call it in a tf.function, or use sum_balanced."
        )
    if compiles_with_xla():
        raise RuntimeError(
            f"{caller}: called in a function with jit_compile=True, which XLA compiles "
            "for one device, without the ops that join several. Leave jit_compile out "
            "of the function that reduces (the towers' own may have it), or use "
            "sum_balanced."
        )
