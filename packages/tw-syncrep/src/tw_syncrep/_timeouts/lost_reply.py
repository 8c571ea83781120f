"""Whether the end of a replica's step is known to the board, and not to the replica.

Its gradient has arrived, the run has gone on, and yet the training op does not
return: what it waits for has been lost on the way, and will not come.
"""

from collections.abc import Sequence

import numpy as np

from tw_syncrep._protocol.run_table import RING, Field, ReplicaField

_MICRO = 1e-6


def overdue_s(
    parts: Sequence[np.ndarray], place: np.ndarray, replica: int, *, running_s: float
) -> float:
    """Tells for how long a replica could have known that its round is over.

    Args:
      parts: of a status, as ``read_status`` takes them.
      place: int64 [2], round and epoch that the replica computes for.
      replica: its number.
      running_s: since when its training op runs; a gradient that arrived before
        is an earlier call's.

    Returns:
      Seconds of the server's clock; 0 where the round goes on or the replica's
      gradient has not arrived.
    """
    about_run, replicas, ring = parts
    row = replicas[:, replica]
    arrived = (row[ReplicaField.ARRIVED_ROUND], row[ReplicaField.ARRIVED_EPOCH])
    now_at = (about_run[Field.ROUND], about_run[Field.EPOCH])
    round_number, epoch = (int(number) for number in place)
    if arrived != (round_number, epoch) or now_at == (round_number, epoch):
        return 0.0
    now, arrived_at = int(about_run[-2]), int(row[ReplicaField.ARRIVED_AT])
    if (now - arrived_at) * _MICRO > running_s:
        return 0.0
    return (now - max(_ended_at(about_run, ring, place), arrived_at)) * _MICRO


def _ended_at(about_run: np.ndarray, ring: np.ndarray, place: np.ndarray) -> int:
    """Returns when a round that is over ended; 0 where the board has forgotten it."""
    if about_run[Field.EPOCH] != place[1]:
        return int(about_run[Field.EPOCH])  # It is named by the time it began at.
    is_remembered = about_run[Field.ROUND] - place[0] <= RING
    return int(ring[place[0] % RING]) if is_remembered else 0
