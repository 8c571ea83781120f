"""The reports of deadline errors, from the status of the run.

The run table records which replicas have arrived in which round, and when each was last
heard from: a waiting replica can see from it where all the others are.
"""

from typing import TypeVar

from tw_core.internal import Recorder, Wait, add_report
from tw_syncrep._errors import ChiefLostError, SyncTimeoutError
from tw_syncrep._timeouts.status import Status, when_heard

_E = TypeVar("_E", bound=SyncTimeoutError)


def report_run(
    error: _E, status: Status, events: Recorder, *, replica: int, deadline_s: float
) -> _E:
    """Adds the report of a wait for the end of a round, or for the start of a run."""
    missing = {f"replica {n}": _replica(status, n) for n in error.missing}
    if isinstance(error, ChiefLostError):
        heard = when_heard(status, status.chief)
        why = f"is the chief, and has not ended the round; {heard}"
        missing[f"replica {status.chief}"] = why
    if not status.incarnation:
        missing["the chief"] = "has not started"
    what = f"the end of round {status.round_number} (step {status.step})"
    wait = Wait(
        who=f"replica {replica}",
        what="the start of the run" if error.step is None else what,
        waited_s=error.waited_s,
        deadline_s=deadline_s,
        arrived=[f"replica {n}" for n in error.arrived],
        missing=missing,
        states={
            f"replica {n}": _replica(status, n) for n in range(len(status.heard_s))
        },
    )
    return add_report(error, wait, events)


def _replica(status: Status, n: int) -> str:
    """Describes a replica's state in the run table."""
    round_number, arrived_s = status.round_number, status.arrived_s[n]
    if n in status.left:
        state = "has left the run"
    elif n in status.evicted:
        state = "was evicted"
    elif n in status.arrived:
        state = f"arrived in round {round_number}, {arrived_s or 0.0:.1f} s ago"
    elif n not in status.joined:
        state = "has not started"
    else:
        last = "never" if arrived_s is None else f"{arrived_s:.1f} s ago"
        state = f"is inside its step of round {round_number}; last arrival {last}"
    chief = ", is the chief" if n == status.chief and status.incarnation else ""
    return f"{state}{chief}; {when_heard(status, n)}"
