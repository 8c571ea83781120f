"""The chief's rounds as a ``QueueRunner``, for sessions without the hook."""

from typing import Any

import tensorflow as tf

from tw_syncrep._exact_device_scope import apart_from_the_caller, on_device
from tw_syncrep._protocol.chief import Meeting


def make_queue_runner(meeting: Meeting, round_op: tf.Operation) -> Any:
    """Makes the runner; at its end it closes the queues.

    Args:
      meeting: of the replicas.
      round_op: one round of the chief.

    Returns:
      A ``tf.compat.v1.train.QueueRunner`` with one thread.
    """
    queue = meeting.arrivals.queue
    with apart_from_the_caller(), on_device(meeting.board.device):
        close = tf.group(queue.close(), meeting.waiting.close_queues())
    return tf.compat.v1.train.QueueRunner(
        queue, [round_op], close_op=close, cancel_op=close
    )
