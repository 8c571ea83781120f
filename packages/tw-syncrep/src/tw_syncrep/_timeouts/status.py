"""The status of a run, read from the run table."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tw_core.renames import renamed_attribute
from tw_syncrep._protocol.run_table import RING, ReplicaField, RunField, run_mark

MICROSECOND_S = 1e-6


@dataclass(frozen=True)
class Status:
    """How a run stood when its table was read.

    Attributes:
      step: the global step.
      round_number: steps since the parameter server started; the one in progress.
      incarnation: begun by the chief's last start; 0 before it.
      is_closed: whether the chief has ended the run.
      chief: the chief's number among the replicas.
      steps_per_s: over the last steps, at most 64; 0 before the second.
      arrived: replicas whose gradients for this round have all arrived.
      missing: replicas of which some have not, without those that have left.
      left: replicas that have left this run in order.
      joined: replicas that have started in this run, without those.
      dropped: gradients that came too late or were one too many.
      waiting_s: seconds since the first arrival of this round; 0 without one.
      arrived_s: seconds since each replica's last arrival; None without one.
      heard_s: seconds since each replica was last heard from; None if it never was.
    """

    step: int
    round_number: int
    incarnation: int
    is_closed: bool
    chief: int
    steps_per_s: float
    arrived: tuple[int, ...]
    missing: tuple[int, ...]
    left: tuple[int, ...]
    joined: tuple[int, ...]
    dropped: int
    waiting_s: float
    arrived_s: tuple[float | None, ...]
    heard_s: tuple[float | None, ...]

    epoch = renamed_attribute("incarnation")


def read_status(parts: Sequence[np.ndarray]) -> Status:
    """Reads the rows of a run table.

    Args:
      parts: int64 vectors: the run's fields, the server's time in microseconds
        and the global step; [fields + 1, R] of the replicas, last how many
        gradients each brings to a round; [RING] ends of rounds.
    """
    about_run, replicas, ring = parts
    run = {field: int(about_run[place]) for place, field in enumerate(RunField)}
    now, step = int(about_run[-2]), int(about_run[-1])
    arrived_at = replicas[ReplicaField.ARRIVED_AT]
    has_arrived = (
        (replicas[ReplicaField.ARRIVED_ROUND] == run[RunField.ROUND])
        & (replicas[ReplicaField.ARRIVED_INCARNATION] == run[RunField.INCARNATION])
        & (replicas[ReplicaField.ARRIVALS] >= replicas[-1])
    )
    mark = run_mark(run[RunField.RUN])
    has_left = replicas[ReplicaField.LEFT] == mark
    has_joined = replicas[ReplicaField.JOINED] == mark
    waiting_since = min(arrived_at[has_arrived], default=now)
    return Status(
        step=step,
        round_number=run[RunField.ROUND],
        incarnation=run[RunField.INCARNATION],
        is_closed=bool(run[RunField.CLOSED]),
        chief=run[RunField.CHIEF],
        steps_per_s=_rate(run[RunField.ROUND] - run[RunField.FIRST_ROUND], ring),
        arrived=_numbers(has_arrived),
        missing=_numbers(~has_arrived & ~has_left),
        left=_numbers(has_left),
        joined=_numbers(has_joined & ~has_left),
        dropped=run[RunField.DROPPED],
        waiting_s=float(now - waiting_since) * MICROSECOND_S,
        arrived_s=_ages(arrived_at, now),
        heard_s=_ages(replicas[ReplicaField.HEARD], now),
    )


def format_status(status: Status) -> str:
    """Formats a status as one line.

    Example:
      "step 37, 41.5 steps/s, arrived 0 1, missing 2 (heard 3.1 s ago), 4 stale
      gradients dropped, waiting 1.2 s"
    """
    parts = [
        f"step {status.step}",
        f"{status.steps_per_s:.1f} steps/s",
        f"arrived {_listed(status.arrived)}",
        f"missing {name_replicas(status, status.missing)}",
        f"{status.dropped} stale gradients dropped",
        f"waiting {status.waiting_s:.1f} s",
    ]
    if status.left:
        parts.append(f"left {_listed(status.left)}")
    if status.is_closed:
        parts.append("closed by the chief")
    return ", ".join(parts)


def name_replicas(status: Status, replicas: Sequence[int]) -> str:
    """Lists replicas, each with when it was last heard from."""
    named = []
    for replica in replicas:
        heard = status.heard_s[replica]
        when = "never heard" if heard is None else f"heard {heard:.1f} s ago"
        named.append(f"{replica} ({when})")
    return ", ".join(named) or "none"


def _rate(rounds: int, ring: np.ndarray) -> float:
    ends = np.sort(ring[ring > 0])[-min(rounds, RING) :] if rounds > 0 else ring[:0]
    seconds = float(ends[-1] - ends[0]) * MICROSECOND_S if len(ends) > 1 else 0.0
    return (len(ends) - 1) / seconds if seconds else 0.0


def _numbers(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(replica) for replica in np.flatnonzero(mask))


def _ages(times: np.ndarray, now: int) -> tuple[float | None, ...]:
    return tuple((now - int(t)) * MICROSECOND_S if t else None for t in times)


def _listed(replicas: Sequence[int]) -> str:
    return " ".join(map(str, replicas)) or "none"
