"""A run table's times, restated by this process's monotonic clock.

The table's times are those of the server's wall clock, which may be set back or forward
while replicas wait. A time that has not changed since the last read has aged by the
time that passed here; one that has changed is no older than the last read. So only the
first read trusts the server's clock, and in an ordinary run nothing is changed.
"""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from tw_syncrep._protocol.run_table import ReplicaField, RunField

_SECOND = 1e6
_REPLICA_TIMES = [ReplicaField.HEARD, ReplicaField.ARRIVED_AT]


class SteadyTimes:
    """Restates the times of one run table, read by read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes a ``clock`` in seconds that never goes back."""
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_at = 0
        self._now = 0
        self._read = self._shown = np.zeros(0, np.int64)

    def restate(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the parts of a status, as ``read_status`` takes them, restated."""
        about_run, replicas, ring = (np.array(part) for part in parts)
        times = [about_run[[RunField.BEGUN_AT]], replicas[_REPLICA_TIMES], ring]
        read = np.concatenate([part.ravel() for part in times])
        with self._lock:
            shown, now = self._restate(read, int(about_run[-2]))
        about_run[RunField.BEGUN_AT], about_run[-2] = shown[0], now
        replicas[_REPLICA_TIMES] = shown[1 : -len(ring)].reshape(2, -1)
        ring[:] = shown[-len(ring) :]
        return [about_run, replicas, ring]

    def _restate(self, read: np.ndarray, server_now: int) -> tuple[np.ndarray, int]:
        looked_at = int(self._clock() * _SECOND)
        if not len(self._read):
            self._now, shown = server_now, np.minimum(read, server_now)
        else:
            passed = looked_at - self._looked_at
            self._now += passed
            changed_to = self._now - np.clip(server_now - read, 0, passed)
            shown = np.where(read == self._read, self._shown, changed_to)
            shown[read == 0] = 0  # Nothing was written.
        self._looked_at, self._read, self._shown = looked_at, read, shown
        return shown, self._now
