"""How a run stands, read from the board and told in a line."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tw_syncrep._protocol.run_table import RING, Field, ReplicaField, mark

_MICRO = 1e-6


@dataclass(frozen=True)
class Status:
    """How a run stood when the board was read.

    Attributes:
      step: the global step.
      round_number: steps since the parameter server started; the one in progress.
      epoch: begun by the chief's last start; 0 before it.
      is_closed: whether the chief has ended the run.
      chief: the chief's number among the replicas.
      steps_per_s: over the last steps, at most 64; 0 before the second.
      arrived: replicas whose gradients for this round are all there.
      missing: replicas of which some are not, without those that have left.
      left: replicas that have left this run in order.
      joined: replicas that have started in this run, without those.
      dropped: gradients that came too late or were one too many.
      waiting_s: seconds since the first arrival of this round; 0 without one.
      arrived_s: seconds since each replica's last arrival; None without one.
      heard_s: seconds since each replica was last heard; None if it never was.
    """

    step: int
    round_number: int
    epoch: int
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


def read_status(parts: Sequence[np.ndarray]) -> Status:
    """Reads the rows of a board.

    Args:
      parts: int64 vectors: the run's fields, the server's time in microseconds
        and the global step; [fields + 1, R] of the replicas, last how many
        gradients each brings to a round; [RING] ends of rounds.
    """
    about_run, replicas, ring = parts
    run = {field: int(about_run[place]) for place, field in enumerate(Field)}
    now, step = int(about_run[-2]), int(about_run[-1])
    arrived_at = replicas[ReplicaField.ARRIVED_AT]
    is_here = _is_here(replicas, run[Field.ROUND], run[Field.EPOCH])
    present = mark(run[Field.RUN])
    has_left = replicas[ReplicaField.LEFT] == present
    has_joined = replicas[ReplicaField.JOINED] == present
    return Status(
        step=step,
        round_number=run[Field.ROUND],
        epoch=run[Field.EPOCH],
        is_closed=bool(run[Field.CLOSED]),
        chief=run[Field.CHIEF],
        steps_per_s=_rate(run[Field.ROUND] - run[Field.FIRST_ROUND], ring),
        arrived=_numbers(is_here),
        missing=_numbers(~is_here & ~has_left),
        left=_numbers(has_left),
        joined=_numbers(has_joined & ~has_left),
        dropped=run[Field.DROPPED],
        waiting_s=float(now - min(arrived_at[is_here], default=now)) * _MICRO,
        arrived_s=_ages(arrived_at, now),
        heard_s=_ages(replicas[ReplicaField.HEARD], now),
    )


def format_status(status: Status) -> str:
    """Tells a status in one line.

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
    """Names replicas and when each was last heard."""
    named = []
    for replica in replicas:
        heard = status.heard_s[replica]
        when = "never heard" if heard is None else f"heard {heard:.1f} s ago"
        named.append(f"{replica} ({when})")
    return ", ".join(named) or "none"


def _is_here(replicas: np.ndarray, round_number: int, epoch: int) -> np.ndarray:
    """Tells whose gradients for this round are all there, bool [R]."""
    is_same_round = replicas[ReplicaField.ARRIVED_ROUND] == round_number
    is_same_epoch = replicas[ReplicaField.ARRIVED_EPOCH] == epoch
    is_all = replicas[ReplicaField.ARRIVALS] >= replicas[-1]
    is_here: np.ndarray = is_same_round & is_same_epoch & is_all
    return is_here


def _rate(rounds: int, ring: np.ndarray) -> float:
    ends = np.sort(ring[ring > 0])[-min(rounds, RING) :] if rounds > 0 else ring[:0]
    seconds = float(ends[-1] - ends[0]) * _MICRO if len(ends) > 1 else 0.0
    return (len(ends) - 1) / seconds if seconds else 0.0


def _numbers(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(replica) for replica in np.flatnonzero(mask))


def _ages(times: np.ndarray, now: int) -> tuple[float | None, ...]:
    return tuple((now - int(t)) * _MICRO if t else None for t in times)


def _listed(replicas: Sequence[int]) -> str:
    return " ".join(map(str, replicas)) or "none"
