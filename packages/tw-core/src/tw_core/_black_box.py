"""The last events of a task, and the report attached to a deadline error.

Code that bounds a wait keeps a ``Recorder`` of what began, arrived and ended, and of
what is still open. It costs less than a microsecond per event. When a wait misses its
deadline, ``add_report`` describes all recorders of the process, its threads, versions
and devices in a text that can be pasted into an issue, and adds it to the error::

    began, ended, arrived ──▶ Recorder (one per waiter) ──┐
    a wait misses its deadline ──▶ Wait ──────────────────┴─▶ report ──▶ error.report
                                                                    └──▶ a file

The file is in the folder that the environment variable ``TW_REPORTS`` names, by default
``tw-reports`` in the working directory; none is written if the variable is empty. A
process keeps at most ``MOST_FILES``: its first reports, and its latest.

A report contains none of the program's values: no environment, arguments or locals. It
does contain the names and addresses of tasks, and the functions that threads are in.

Nothing here needs TensorFlow, or starts its runtime.
"""

import contextlib
import itertools
import logging
import os
import platform
import re
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypeVar

from tw_core._checks import check_text

KEPT = 100
"""Number of events that a recorder keeps."""
MOST_FILES = 5
"""Most files that a process writes; later reports overwrite the last one."""

_FRAMES = 6
_THREADS = 40
_log = logging.getLogger(__name__)
_recorders: "weakref.WeakSet[Recorder]" = weakref.WeakSet()
_files = itertools.count(1)
_T = TypeVar("_T")
_E = TypeVar("_E", bound=Exception)


class DeadlineError(TimeoutError):
    """A wait has missed its deadline.

    Attributes:
      report: where each tower and task was; empty if no report was made.
      report_path: the file that it was written to; None if it was not written.
    """

    report: str = ""
    report_path: Path | None = None


class Event(NamedTuple):
    """Something that a tower, a task or a thread did."""

    at_s: float  # seconds of time.monotonic
    kind: str  # "began", "ended", "arrived" or another verb
    who: str  # "tower 1", "replica 0", "rank 2"
    what: str  # the step, round, collective or load
    number: int | None  # of the step, round, ...; None if they are not numbered


class Open(NamedTuple):
    """Something that has begun and not ended; the other fields are an event's."""

    since_s: float  # when it began, in seconds of time.monotonic
    who: str
    what: str
    number: int | None


class Recorder:
    """The last events of one waiter, and those still open; for use from any thread.

    Attributes:
      task: the waiter's name, such as "AsyncRunner of 4 towers".
      facts: further facts for a report, by name.

    >>> events = Recorder("AsyncRunner of 2 towers")
    >>> events.began("tower 0", "step", 7)
    >>> [(found.who, found.what, found.number) for found in events.open]
    [('tower 0', 'step', 7)]
    >>> events.ended("tower 0", "step", 7)
    >>> [event.kind for event in events.events], events.open
    (['began', 'ended'], [])
    """

    def __init__(
        self,
        task: str,
        *,
        facts: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts without events, and is included in the reports of this process.

        Args:
          task: the waiter's name.
          facts: further facts for a report, by name; no secrets.
          clock: returns seconds.

        Raises:
          TypeError: ``task`` is not a string.
          ValueError: it is empty.
        """
        self.task = check_text(task=task)
        self.facts = dict(facts or {})
        self._clock = clock
        # Each operation on them is one call in C: no thread sees half of it.
        self._events: deque[tuple[float, str, str, str, int | None]]
        self._events = deque(maxlen=KEPT)
        self._open: dict[tuple[str, str], tuple[float, int | None]] = {}
        _recorders.add(self)

    def began(self, who: str, what: str, number: int | None = None) -> None:
        """Notes that something has begun; it is open until ``ended``."""
        now = self._clock()
        self._events.append((now, "began", who, what, number))
        self._open[who, what] = (now, number)

    def ended(self, who: str, what: str, number: int | None = None) -> None:
        """Notes that something has ended; harmless if it had not begun."""
        self._events.append((self._clock(), "ended", who, what, number))
        self._open.pop((who, what), None)

    def noted(self, kind: str, who: str, what: str, number: int | None = None) -> None:
        """Notes any other kind of event, such as "arrived"."""
        self._events.append((self._clock(), kind, who, what, number))

    @contextlib.contextmanager
    def during(self, who: str, what: str, number: int | None = None) -> Iterator[None]:
        """Notes that something begins here, and ends with the scope."""
        self.began(who, what, number)
        try:
            yield
        finally:
            self.ended(who, what, number)

    @property
    def events(self) -> list[Event]:
        """The last ``KEPT`` events, oldest first."""
        return [Event(*event) for event in _unchanged(lambda: list(self._events))]

    @property
    def open(self) -> list[Open]:
        """Everything that has begun and not ended, oldest first."""
        found = [Open(s, *key, n) for key, (s, n) in self._open.copy().items()]
        return sorted(found, key=lambda one: one.since_s)


@dataclass(frozen=True)
class Wait:
    """A wait that has missed its deadline.

    Attributes:
      who: the waiter.
      what: the round, collective, step or load that it waits for.
      waited_s: how long it waited.
      deadline_s: how long it may wait.
      arrived: names of those that have arrived.
      missing: the last known state of each that has not arrived, by name.
      states: the last known states of the others, by name.
    """

    who: str
    what: str
    waited_s: float
    deadline_s: float
    arrived: Sequence[str] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    states: Mapping[str, str] = field(default_factory=dict)


def report(wait: Wait, recorder: Recorder, *, message: str = "") -> str:
    """Describes a wait that has missed its deadline, and the state of this process.

    Args:
      wait: the wait.
      recorder: the waiter's; the process's other recorders follow.
      message: the error's message.

    Returns:
      Lines of text: the wait, where the others were, the last events, threads,
      versions, devices.

    Raises:
      TypeError: ``wait`` is not a ``Wait``, or ``recorder`` not a ``Recorder``.
    """
    if not isinstance(wait, Wait):
        raise TypeError(f"report: wait must be a black_box.Wait; got {wait!r:.80}.")
    if not isinstance(recorder, Recorder):
        raise TypeError(
            f"report: recorder must be a black_box.Recorder; got {recorder!r:.80}."
        )
    now, at = time.monotonic(), time.time()
    others = [other for other in _unchanged(lambda: list(_recorders))]
    every = [recorder, *(other for other in others if other is not recorder)]
    parts: list[tuple[str, Callable[[], list[str]]]] = [
        ("The wait that missed its deadline", lambda: _about(wait, message, at)),
        ("Where the others were", lambda: _named(wait.states)),
        (
            "Where this process was",
            lambda: [
                *(_inside(recorder, now, at) or ["nothing"]),
                *(line for one in every[1:] for line in _inside(one, now, at)),
            ],
        ),
        *(
            (f"Last events of {one.task}", partial(_told, one, now))
            for one in every
            if one.events
        ),
        ("Threads, innermost call first", _threads),
        ("Versions", _versions),
        (
            "Devices",
            lambda: [*_devices(), *(f for one in every for f in _named(one.facts))],
        ),
    ]
    head = f"tw report: {recorder.task}, process {os.getpid()}, {_stamp(at)}"
    lines = [head]
    for title, tell in parts:
        try:
            told = tell()
        except Exception as error:  # The other parts are still reported.
            told = [f"could not be described: {error!r}"]
        if told:
            lines += ["", title, *(f"  {line}" for line in told)]
    return "\n".join(lines) + "\n"


def add_report(error: _E, wait: Wait, recorder: Recorder, *, text: str = "") -> _E:
    """Adds a report to an error, and writes it to a file.

    Failures in here are not raised: they would hide the error.

    Args:
      error: about to be raised; gets ``report``, ``report_path`` and a note with the
        path.
      wait: the wait that missed its deadline.
      recorder: the waiter's.
      text: the text that ``report`` returned for it; empty to make it now.

    Returns:
      The error.
    """
    path: Path | None = None
    try:
        message = f"{type(error).__name__}: {error}"
        text = text or report(wait, recorder, message=message)
    except Exception as failure:
        text, where = "", f"No report could be made: {failure!r}"
    else:
        path, where = _write(text, recorder.task)
    error.report, error.report_path = text, path  # type: ignore[attr-defined]
    error.add_note(where)
    if path is not None:  # In case the error gets lost, as in a session's op.
        _log.warning("%s", where)
    return error


def _write(text: str, task: str) -> tuple[Path | None, str]:
    """Writes a report; returns its path, and a sentence for the error's note."""
    named = os.environ.get("TW_REPORTS", "tw-reports")
    if not named:
        return None, "The error's `report` says what hung and who had arrived."
    name = re.sub(r"[^a-z0-9]+", "-", task.lower()).strip("-")[:60]
    number = min(next(_files), MOST_FILES)
    path = Path(named).absolute() / f"{name}-{os.getpid()}-{number}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as failure:
        return None, (
            "The error's `report` says what hung and who had arrived; it could not be "
            f"written to {path} ({failure.strerror or failure}): set TW_REPORTS to "
            "another folder."
        )
    return path, f"Report of the hang: {path} (paste it into an issue)."


def _about(wait: Wait, message: str, at: float) -> list[str]:
    began = _stamp(at - wait.waited_s)
    lines = [
        f"waiter    {wait.who}",
        f"waits for {wait.what}",
        f"since     {began}: {wait.waited_s:.1f} s; deadline {wait.deadline_s:g} s",
        f"arrived   {', '.join(wait.arrived) or 'none'}",
    ]
    missing = [f"{who}: {state}" for who, state in wait.missing.items()] or ["none"]
    lines += [f"missing   {line}" for line in missing]
    return lines + [f"error     {line}" for line in message.splitlines()]


def _inside(recorder: Recorder, now: float, at: float) -> list[str]:
    """Lists what is open in a recorder, and for how long."""
    return [
        f"{recorder.task}: {one.who}: {_numbered(one.what, one.number)} for "
        f"{now - one.since_s:.1f} s, since {_stamp(at - (now - one.since_s))}"
        for one in recorder.open
    ]


def _told(recorder: Recorder, now: float) -> list[str]:
    """Lists the events, with their seconds relative to the report."""
    return [
        f"{event.at_s - now:+.3f} s  {event.who} {event.kind} "
        f"{_numbered(event.what, event.number)}"
        for event in recorder.events
    ]


def _threads() -> list[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    lines = [
        f"{names.get(number, 'unknown')}: {_calls(frame)}"
        for number, frame in [*frames.items()][:_THREADS]
    ]
    frames.clear()  # This function's own frame is among them: a reference cycle.
    return sorted(lines)


def _calls(innermost: FrameType) -> str:
    """Lists the calls of a thread, without arguments or folders."""
    calls: list[str] = []
    frame: FrameType | None = innermost
    while frame is not None and len(calls) < _FRAMES:
        module = frame.f_globals.get("__name__", "?")
        calls.append(f"{module}.{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(calls)


def _versions() -> list[str]:
    lines = [f"Python {platform.python_version()} on {platform.platform()}"]
    for name in ("tensorflow", "keras", "tf_keras", "numpy"):
        if (module := sys.modules.get(name)) is not None:
            lines.append(f"{name} {getattr(module, '__version__', 'unknown')}")
    for name in sorted(sys.modules):
        if name.startswith("tw_") and "." not in name:
            name = name.replace("_", "-")
            with contextlib.suppress(metadata.PackageNotFoundError):
                lines.append(f"{name} {metadata.version(name)}")
    return lines


def _devices() -> list[str]:
    lines = [f"{os.cpu_count()} processors"]
    if "tensorflow" not in sys.modules:
        return [*lines, "TensorFlow is not imported"]
    from tw_core._tf_compat import devices_of_runtime

    names = devices_of_runtime()
    if names is None:
        return [*lines, "TensorFlow's eager runtime has not started, so has no devices"]
    return lines + names


def _named(values: Mapping[str, str]) -> list[str]:
    return [f"{name}: {value}" for name, value in values.items()]


def _numbered(what: str, number: int | None) -> str:
    return what if number is None else f"{what} {number}"


def _stamp(at: float) -> str:
    seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    return f"{seconds}.{int(at % 1 * 1000):03d} UTC"


def _unchanged(read: Callable[[], _T]) -> _T:
    """Repeats a read until no other thread changes the container meanwhile."""
    while True:
        try:
            return read()
        except RuntimeError:  # "changed size", or "mutated during iteration"
            continue
