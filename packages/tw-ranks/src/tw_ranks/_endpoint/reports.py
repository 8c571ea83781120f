"""This rank's reports of its progress, and errors that name missing ranks.

Both need the side channel; ``member`` is this rank's end of it until the rank leaves.
"""

import contextlib
import threading
import time
from collections.abc import Collection, Iterator, Sequence

import tensorflow as tf

from tw_core.internal import Recorder, Wait, add_report, report
from tw_ranks import _tf_compat
from tw_ranks._endpoint.interrupts import InterruptWatch
from tw_ranks._endpoint.progress import Progress
from tw_ranks._engines.mpi import EndedError
from tw_ranks._errors import RankTimeoutError
from tw_ranks._side_channel._attendance import (
    Deadlines,
    Report,
    describe_missing,
    describe_report,
)
from tw_ranks._side_channel._member import Member

_VERDICT_S = 2.0
_PROBED_S = 5.0
"""How long to wait for a verdict while connections between ranks are checked."""

_STILL_S = 1.0
AGREEMENT = "agreement on"


class Reports:
    """Reports this rank's progress, and raises errors that name missing ranks."""

    def __init__(
        self,
        rank: int,
        tasks: Sequence[str],
        *,
        member: Member | None,
        progress: Progress,
        interrupts: InterruptWatch | None,
        limits: Deadlines,
        engine: str,
        aborts: bool,
    ) -> None:
        """``member`` is None in a group of one.

        ``aborts``: whether collectives of a lost rank end only if TensorFlow aborts
        them.
        """
        self.member = member  # None once it has left, too.
        self.moved_s = time.monotonic()  # When it was last seen to make progress.
        self._progress = progress
        self.hear_interrupt = interrupts.hear if interrupts else lambda: None
        self._rank, self._tasks, self._limits = rank, tasks, limits
        self._aborts = aborts
        self._name = f"rank {rank}"
        self._events = Recorder(
            f"ProcessGroup, rank {rank} of {len(tasks)}",
            facts={
                **{f"rank {r}": task for r, task in enumerate(tasks)},
                "engine": engine,
            },
        )
        self._reported = 0, 0
        self._reporting = threading.Lock()
        self._lost: RankTimeoutError | None = None

    def read_report(self) -> Report:
        """Returns how far this rank is."""
        member = self.member
        report = self._progress.report(member)
        entered, completed = report.entered, report.completed
        if (entered, completed) != self._reported:  # No Python runs inside a step.
            self._reported, self.moved_s = (entered, completed), time.monotonic()
            self._events.noted("was seen", self._name, "entered collective", entered)
        still_s = time.monotonic() - self.moved_s
        if entered > completed and still_s >= _STILL_S and member is not None:
            member.hold_connections()
        return report

    def forget_member(self) -> None:
        """Drops the side channel, as this rank has left."""
        self.member = None

    def wait_for(self, what: str) -> None:
        """Waits until rank 0 has announced an event."""
        if self.member is None:
            return
        with self.waiting(f"rank 0 to announce {what!r}"):
            self.member.wait_for(what)

    @contextlib.contextmanager
    def naming_missing(self, what: str) -> Iterator[None]:
        """Scope of collectives, ``what`` in reports; errors name missing ranks."""
        self._events.began(self._name, what)
        try:
            yield
        except (tf.errors.OpError, EndedError) as error:
            missing = self.find_missing(
                is_unavailable=isinstance(error, tf.errors.UnavailableError)
            )
            self.hear_interrupt()
            if missing is None:
                raise
            raise missing from error
        self._events.ended(self._name, what)

    @contextlib.contextmanager
    def waiting(self, what: str, number: int | None = None) -> Iterator[None]:
        """Scope of a wait on the side channel, ``what`` in reports."""
        self._events.began(self._name, what, number)
        try:
            yield
        except TimeoutError:  # The event stays open: this rank is still in it.
            raise self.find_absent() from None
        except BaseException:
            self._events.ended(self._name, what, number)
            raise
        self._events.ended(self._name, what, number)

    def find_absent(self) -> RankTimeoutError:
        """Returns the error behind a TimeoutError of ``member``, with the ranks."""
        return self._as_error({} if self.member is None else self.member.missing)

    def find_missing(self, *, is_unavailable: bool = False) -> RankTimeoutError | None:
        """Returns the error behind a collective's error; None if no rank is missing.

        If a rank's server ``is_unavailable``, ranks check their connections.
        """
        if self.member is None:
            return None
        # An error from anything else, such as the end of a dataset, need not wait.
        wait_s = _VERDICT_S if self._progress.is_inside() else 0.0
        if wait_s and is_unavailable:
            self.member.tell_failure()
            wait_s = _PROBED_S
        missing = self.member.wait_for_missing(wait_s)
        return self._as_error(missing) if missing else None

    def abort(self, missing: dict[int, str]) -> None:
        """Aborts this rank's collectives, as ranks are missing."""
        try:
            # While this rank is still inside the collective.
            text = report(self._wait(missing), self._events)
        except Exception:  # The report is made again with the error.
            text = ""
        if self._aborts:
            _tf_compat.abort_collectives(self._describe(missing))
        self._as_error(missing, text)

    def _as_error(self, missing: dict[int, str], text: str = "") -> RankTimeoutError:
        """Returns an error; those of all threads share one report, made once."""
        wait = self._wait(missing)
        error = RankTimeoutError(
            self._describe(missing),
            waited_s=wait.deadline_s,
            arrived=sorted(set(range(len(self._tasks))) - set(missing)),
            missing=sorted(missing),
        )
        with self._reporting:
            if self._lost is None:
                self._lost = add_report(error, wait, self._events, text=text)
            else:
                error.report = self._lost.report
                error.report_path = self._lost.report_path
                error.add_note(self._lost.__notes__[0])
        return _tf_compat.kept_by_autograph(error)

    def _wait(self, missing: dict[int, str]) -> Wait:
        """Describes this rank's wait, and what is known about the other ranks."""
        own, member, now_s = self.read_report(), self.member, time.monotonic()
        states = member.states if member is not None else {}
        states = states or {self._rank: describe_report(own)}
        arrived: Collection[int] = member.arrived if member is not None else ()
        what = f"collective {own.entered + (own.completed == own.entered)}"
        if own.inside:
            what += f" (traced last: {own.inside!r})"
        since_s, deadline_s = self.moved_s, self._limits.timeout_s
        if now_s - since_s >= self._limits.stall_timeout_s:
            deadline_s = self._limits.stall_timeout_s
        for one in self._events.open:
            if one.what.startswith(AGREEMENT):
                what, arrived = one.what, set(states) - set(missing)
                since_s, deadline_s = one.since_s, self._limits.first_timeout_s
        return Wait(
            who=self._name,
            what=what,
            waited_s=now_s - since_s,
            deadline_s=deadline_s,
            arrived=[f"rank {rank}" for rank in sorted(arrived or {self._rank})],
            missing={f"rank {rank}": why for rank, why in sorted(missing.items())},
            states={f"rank {rank}": state for rank, state in sorted(states.items())},
        )

    def _describe(self, missing: dict[int, str]) -> str:
        return describe_missing(missing, self._tasks, own=self._rank)
