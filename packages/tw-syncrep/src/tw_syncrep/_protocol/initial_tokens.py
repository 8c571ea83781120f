"""Tokens before the first step: with them, replicas go on before it is over.

They are needed where there are fewer replicas than gradients asked for: somebody
must then bring a second gradient before the first round can end. More of them
let replicas compute gradients that come too late, as TensorFlow's default does.
"""

import tensorflow as tf

from tw_core.checks import check_whole_number
from tw_syncrep._exact_device_scope import apart_from_the_caller
from tw_syncrep._protocol.chief import Meeting
from tw_syncrep._protocol.lifecycle import initial_rows
from tw_syncrep._protocol.wake_queues import Token


def initial_tokens(num_tokens: int, *, aggregate: int, total: int) -> tuple[int, ...]:
    """Shares out initial tokens among the replicas.

    Args:
      num_tokens: how many; -1 is as many as are needed.
      aggregate: gradients that make a step.
      total: replicas.

    Returns:
      [total] tokens of each replica, as even as can be.

    Raises:
      TypeError: not a whole number.
      ValueError: the first step could not end with so few.
    """
    caller = "SyncReplicasOptimizer.get_init_tokens_op"
    num_tokens = check_whole_number(caller, num_tokens=num_tokens)
    needed = max(0, aggregate - total)
    if num_tokens == -1:
        num_tokens = needed
    if num_tokens < needed:
        raise ValueError(
            f"{caller}: Too few tokens to finish the "
            f"first step: {num_tokens} (given) vs {needed} (needed)."
        )
    share, more = divmod(num_tokens, total)
    return tuple(share + (replica < more) for replica in range(total))


def send_initial_tokens(meeting: Meeting, num_tokens: int) -> tf.Operation:
    """Returns the op that sends initial tokens; see ``initial_tokens``."""
    counts = initial_tokens(
        num_tokens, aggregate=meeting.aggregate, total=meeting.replicas
    )
    with apart_from_the_caller():
        initial = tf.constant(counts, tf.int64)
        given = meeting.board.write(initial_rows(initial, meeting.replicas))
        with tf.control_dependencies([given]):
            # Replicas that wait already must look again.
            return tf.group(meeting.waiting.send_all(Token.LOOK), name="init_tokens")
