"""The state of a run, read from its table, and judgements of long waits."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tw_syncrep._errors import (
    ChiefLostError,
    ReplicaTimeoutError,
    SyncTimeoutError,
)
from tw_syncrep._protocol.run_table import RING, ReplicaField, RunField, run_mark

_MICROSECOND_S = 1e-6
_QUESTIONS_PER_S = 100.0


@dataclass(frozen=True)
class Status:
    """The state of a run when its table was read.

    Attributes:
      step: the global step.
      round_number: the round in progress: steps since the parameter server started.
      incarnation: begun by the chief's last start; 0 before it, and while the chief
        initializes or restores the variables.
      is_closed: whether the chief has ended the run.
      chief: the chief's number among the replicas.
      steps_per_s: over the last steps, at most 64; 0 before the second.
      arrived: replicas whose gradients for this round have all arrived.
      missing: replicas with gradients yet to arrive, except those that have left or
        were evicted.
      left: replicas that have ended normally and so left this run.
      evicted: replicas that this run does not wait for until they return.
      joined: replicas that have started in this run, except those that left or were
        evicted.
      dropped: gradients that arrived too late or were one too many.
      waiting_s: seconds since the first arrival of this round; 0 without one.
      arrived_s: seconds since each replica's last arrival; None without one.
      heard_s: seconds since each replica was last heard from; None if it never was.
      cut_off: rounds whose chief was lost while their means were being applied: they
        count, but some variables may have missed them.
      evictions: number of evictions since the server started.
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
    cut_off: int = 0
    evicted: tuple[int, ...] = ()
    evictions: int = 0


def read_status(parts: Sequence[np.ndarray]) -> Status:
    """Reads the parts of a run table, all int64.

    They are the run's fields, the server's time in microseconds and the global step;
    [fields + 1, R] of the replicas, with their quotas last; [RING] ends of rounds.
    """
    about_run, replicas, ring = parts
    run = {field: int(about_run[place]) for place, field in enumerate(RunField)}
    now, step = int(about_run[-2]), int(about_run[-1])
    arrived_at = replicas[ReplicaField.ARRIVED_AT]
    has_arrived = (
        (replicas[ReplicaField.ARRIVED_ROUND] == run[RunField.ROUND])
        & (replicas[ReplicaField.ARRIVED_INCARNATION] == abs(run[RunField.INCARNATION]))
        & (replicas[ReplicaField.ARRIVALS] >= replicas[-1])
    )
    mark = run_mark(run[RunField.RUN])
    has_left = replicas[ReplicaField.LEFT] == mark
    is_evicted = replicas[ReplicaField.LEFT] == -mark
    is_out = has_left | is_evicted
    has_joined = replicas[ReplicaField.JOINED] == mark
    waiting_since = min(arrived_at[has_arrived], default=now)
    return Status(
        step=step,
        round_number=run[RunField.ROUND],
        incarnation=max(0, run[RunField.INCARNATION]),
        is_closed=bool(run[RunField.CLOSED]),
        chief=run[RunField.CHIEF],
        steps_per_s=_rate(run[RunField.ROUND] - run[RunField.FIRST_ROUND], ring),
        arrived=_numbers(has_arrived),
        missing=_numbers(~has_arrived & ~is_out),
        left=_numbers(has_left),
        joined=_numbers(has_joined & ~is_out),
        dropped=run[RunField.DROPPED],
        waiting_s=max(0.0, float(now - waiting_since)) * _MICROSECOND_S,
        arrived_s=_ages(arrived_at, now),
        heard_s=_ages(replicas[ReplicaField.HEARD], now),
        cut_off=run[RunField.CUT_OFF],
        evicted=_numbers(is_evicted),
        evictions=run[RunField.EVICTED],
    )


def is_held_by_others(
    parts: Sequence[np.ndarray], replica: int, *, within_s: float
) -> bool:
    """Returns whether another replica has trained in this run and is still there.

    Gradients of its process must have counted: processes that have just started, as all
    have after a run was killed, have contributed none.
    """
    about_run, replicas, _ = parts
    heard = about_run[-2] - replicas[ReplicaField.HEARD]
    is_there = heard * _MICROSECOND_S <= within_s
    life = replicas[ReplicaField.LIFE]
    has_trained = (life > 0) & (replicas[ReplicaField.COUNTED] >= life)
    has_begun = replicas[ReplicaField.COUNTED_ROUND] > 0
    others = np.arange(replicas.shape[1]) != replica
    joined = list(read_status(parts).joined)
    return bool((is_there & has_trained & has_begun & others)[joined].any())


def is_replaced(parts: Sequence[np.ndarray], replica: int, *, life: int) -> bool:
    """Returns whether a later process has taken a replica's number."""
    return bool(0 < life < parts[1][ReplicaField.LIFE, replica])


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
    if status.evicted:
        parts.append(f"evicted {name_replicas(status, status.evicted)}")
    if status.is_closed:
        parts.append("closed by the chief")
    return ", ".join(parts)


def name_replicas(status: Status, replicas: Sequence[int]) -> str:
    """Lists replicas, each with the time since it was last heard from."""
    named = [f"{replica} ({when_heard(status, replica)})" for replica in replicas]
    return ", ".join(named) or "none"


def when_heard(status: Status, replica: int) -> str:
    """Formats when a replica was last heard from."""
    heard_s = status.heard_s[replica]
    return "never heard" if heard_s is None else f"heard {heard_s:.1f} s ago"


def judge_wait(
    status: Status, replica: int, *, timeout_s: float, needed: int
) -> SyncTimeoutError | None:
    """Returns the error if a replica has waited too long; None if it may go on."""
    waited = status.arrived_s[replica]
    if replica not in status.arrived or waited is None or waited < timeout_s:
        return None
    # With fewer replicas than gradients, all must have sent all of theirs.
    is_complete = len(status.arrived) >= min(needed, _present(status))
    chief_is_silent = is_silent(status, status.chief, within_s=timeout_s / 2)
    chief_is_lost = is_complete or (status.chief in status.missing and chief_is_silent)
    lost = name_replicas(status, [status.chief])
    about_chief = f" The chief is lost: replica {lost} has not ended the step."
    return _timeout_error(
        ChiefLostError if chief_is_lost else ReplicaTimeoutError,
        f"SyncReplicasOptimizer: replica {replica} waited {waited:.1f} s for the end "
        f"of step {status.step}; wait_timeout_s is {timeout_s:g}."
        f"{about_chief if chief_is_lost else ''} Arrived: "
        f"{name_replicas(status, status.arrived)}. Missing: "
        f"{name_replicas(status, status.missing)}. Restart missing replicas before the "
        "timeout, raise wait_timeout_s, or add backups (total_num_replicas above "
        "replicas_to_aggregate).",
        status,
        waited_s=waited,
    )


def find_evicted(
    status: Status,
    error: SyncTimeoutError,
    replica: int,
    *,
    timeout_s: float,
    min_replicas: int,
) -> tuple[int, ...] | None:
    """Returns the replicas that an elastic run evicts to go on; None if it cannot.

    If the chief is lost, ``replica`` takes over, and a replica that is missing but was
    heard from recently may be about to arrive: it is not evicted with the chief.
    """
    if not status.incarnation:  # The chief restores the variables.
        return None
    evicted = set(status.missing)
    if isinstance(error, ChiefLostError):
        silent = {n for n in evicted if is_silent(status, n, within_s=timeout_s / 2)}
        evicted = (silent | {status.chief}) - {replica}
    if _present(status) - len(evicted) < min_replicas:
        return None
    return tuple(sorted(evicted))


def is_acting(status: Status, *, within_s: float) -> bool:
    """Returns whether the chief is in an open run, heard from within ``within_s``."""
    is_open = status.incarnation > 0 and not status.is_closed
    is_in_run = status.chief in status.joined
    return (
        is_open and is_in_run and not is_silent(status, status.chief, within_s=within_s)
    )


def is_silent(status: Status, replica: int, *, within_s: float) -> bool:
    """Returns whether a replica was not heard from within ``within_s``."""
    heard_s = status.heard_s[replica]
    return heard_s is None or heard_s > within_s


def judge_absence(
    status: Status, replica: int, *, timeout_s: float, needed: int
) -> SyncTimeoutError | None:
    """Returns the error if the others have given up on a replica that is missing.

    It would not notice otherwise: their waits have ended, and its own has not begun.
    """
    is_needed = len(status.arrived) < min(needed, _present(status))
    if replica not in status.missing or not is_needed or status.waiting_s < timeout_s:
        return None
    return _timeout_error(
        ReplicaTimeoutError,
        f"SyncReplicasOptimizer: the gradient of replica {replica} for step "
        f"{status.step} has not arrived; others have waited {status.waiting_s:.1f} s "
        f"for it and given up (wait_timeout_s is {timeout_s:g}). Arrived: "
        f"{name_replicas(status, status.arrived)}. Missing: "
        f"{name_replicas(status, status.missing)}. If its step takes that long, raise "
        "wait_timeout_s; otherwise check its input and its network.",
        status,
        waited_s=status.waiting_s,
    )


def _timeout_error(
    kind: type[SyncTimeoutError], message: str, status: Status, *, waited_s: float
) -> SyncTimeoutError:
    return kind(
        message,
        step=status.step,
        waited_s=waited_s,
        arrived=status.arrived,
        missing=status.missing,
        heard_s=status.heard_s,
    )


def _present(status: Status) -> int:
    """Returns how many replicas have not left."""
    return len(status.arrived) + len(status.missing)


def overdue_s(
    parts: Sequence[np.ndarray],
    position: np.ndarray,
    replica: int,
    *,
    running_s: float,
) -> float:
    """Returns the seconds since the replica's round ended; 0 if it may still wait.

    If its gradient has arrived and the run has gone on, yet the training op does not
    return, the token or reply that it waits for was lost.
    """
    about_run, replicas, ring = parts
    row = replicas[:, replica]
    arrived = row[[ReplicaField.ARRIVED_ROUND, ReplicaField.ARRIVED_INCARNATION]]
    current = about_run[[RunField.ROUND, RunField.INCARNATION]]
    if not np.array_equal(arrived, position) or np.array_equal(current, position):
        return 0.0
    if current[1] <= 0:  # The chief restores the variables, and will wake the replica.
        return 0.0
    now, arrived_at = int(about_run[-2]), int(row[ReplicaField.ARRIVED_AT])
    if (now - arrived_at) * _MICROSECOND_S > running_s:  # an earlier call's gradient
        return 0.0
    waits_since = max(_ended_at(about_run, ring, position), arrived_at)
    return (now - waits_since) * _MICROSECOND_S


def longest_pause_s(replicas: int) -> float:
    """Returns the seconds between two reads of the table in a long wait.

    Each read returns rows of all replicas. So beyond a hundred replicas, each reads
    less often, and all together at most a hundred times a second.
    """
    return max(1.0, replicas / _QUESTIONS_PER_S)


def _rate(rounds: int, ring: np.ndarray) -> float:
    ends = np.sort(ring[ring > 0])[-min(rounds, RING) :] if rounds > 0 else ring[:0]
    seconds = float(ends[-1] - ends[0]) * _MICROSECOND_S if len(ends) > 1 else 0.0
    return (len(ends) - 1) / seconds if seconds else 0.0


def _numbers(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(replica) for replica in np.flatnonzero(mask))


def _ages(times: np.ndarray, now: int) -> tuple[float | None, ...]:
    # The server's clock may have been set back since.
    return tuple(max(0, now - int(t)) * _MICROSECOND_S if t else None for t in times)


def _listed(replicas: Sequence[int]) -> str:
    return " ".join(map(str, replicas)) or "none"


def _ended_at(about_run: np.ndarray, ring: np.ndarray, position: np.ndarray) -> int:
    """Returns when a round that is over ended; 0 if the table no longer has it."""
    round_number, incarnation = position
    if about_run[RunField.INCARNATION] != incarnation:
        return int(about_run[RunField.BEGUN_AT])
    is_remembered = about_run[RunField.ROUND] - round_number <= RING
    return int(ring[round_number % RING]) if is_remembered else 0
