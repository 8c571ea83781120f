"""``tw-doctor``: supervises the examining process, within time limits, and reports.

A collective that waits for a device that never joins cannot be interrupted, nor can
much else inside TensorFlow. So everything that touches a device runs in its own
process. A step that reports nothing for ``--timeout`` seconds is named and killed, and
a new process continues with the rest; at ``--time-limit`` everything ends.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO, Any, NoReturn, cast

from tw_core.internal import check_list, check_text
from tw_doctor._machine.page import PARTS, Page, check_line, facts_lines
from tw_reduce.internal import FORMAT, version_of

_EXAMPLES = """\
examples:
  tw-doctor                                  all checks, then measurements
  tw-doctor --towers 8 --json machine.json   for all_reduce(devices, measured=...)
  tw-doctor --device cpu --checks-only       only the checks, in seconds
  tw-doctor model train:make_model           a Keras model over towers (tw-keras)
"""
_COMMANDS = "tw_doctor.commands"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line, this process's by default."""
    parser = argparse.ArgumentParser(
        prog="tw-doctor",
        description="Tests the towers packages on this machine's devices, and measures "
        "copies, reducers and\nscaling. Exits with 1 if anything fails. Defaults are "
        "in parentheses.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--towers",
        type=_towers,
        help="number of towers, 2 or more; several share a GPU if there are fewer "
        "GPUs, and CPUs are logical devices (one per GPU, or 2)",
        metavar="K",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="kind of the towers' devices; auto: GPUs if there are any (auto)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="file for the whole report, for `measured=` of auto and all_reduce",
        metavar="FILE",
    )
    parser.add_argument(
        "--checks-only", action="store_true", help="run the checks, measure nothing"
    )
    parser.add_argument(
        "--measure-for",
        type=_seconds,
        default=math.inf,
        help="seconds to measure after the checks (all that the time limit leaves)",
        metavar="S",
    )
    parser.add_argument(
        "--time-limit",
        type=_seconds,
        default=120.0,
        help="seconds after which everything ends, even if work is left (120)",
        metavar="S",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=30.0,
        help="seconds after which a single check or measurement counts as hung (30)",
        metavar="S",
    )
    parser.add_argument(
        "--version", action="version", version=f"tw-doctor {version_of('tw-doctor')}"
    )
    options = parser.parse_args(arguments)
    if options.json is not None and (fault := _unwritable(options.json)):
        parser.error(f"argument --json: {fault}")
    return options


def _unwritable(path: Path) -> str:
    """Returns why a file cannot be written, before minutes of work are lost."""
    if path.is_dir():
        return f"{path} is a folder"
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if not os.access(path if path.exists() else folder, os.W_OK):
        return f"{path} cannot be written"
    return ""


def _towers(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"must be 2 or more; got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be seconds above 0; got {text!r}")
    return seconds


_STARTS_WITHIN_S = 60.0
_USED = 0.85  # of the time limit; the rest is for steps that take longer than planned
_INTERRUPTED, _TERMINATED = 130, 143
Event = dict[str, Any]


class Examination:
    """The results so far, and the work that is left."""

    def __init__(self, options: argparse.Namespace, page: Page) -> None:
        self.report: dict[str, Any] = {"format": FORMAT, "checks": []}  # for --json
        self.faults: list[str] = []  # a sentence each
        self.is_over = False
        self._options, self._page = options, page
        self._begun = time.monotonic()
        self._parts = [] if options.checks_only else list(PARTS)
        self._failed: list[str] = []
        self._doing: Event = {}
        self._checked = False

    @property
    def left_s(self) -> float:
        """Seconds until the time limit."""
        return float(self._options.time_limit - (time.monotonic() - self._begun))

    def job(self) -> Event:
        """Returns the job of the next examining process."""
        return {
            "device": self._options.device,
            "towers": self._options.towers,
            "done": [check["name"] for check in self.report["checks"]],
            "failed": self._failed,
            "parts": self._parts,
            "seconds": _USED * self.left_s,
            "measure_for": self._options.measure_for,
        }

    def take(self, event: Event) -> None:
        """Records an event of the process."""
        kind = event.pop("event")
        if kind == "doing":
            self._doing = event
            self._page.progress(self._share(event), event["what"])
        elif kind == "towers":
            self.report["devices"] = event["devices"]
        elif kind == "facts":
            self._note_facts(event)
        elif kind == "check":
            self._note_check(event)
        elif kind == "checked":
            self._checked, self._doing = True, {}
        elif kind == "broken":
            self._end(event["said"])
        elif kind == "end":
            self.is_over = True
        else:
            self._note_part(kind, event)

    def note_time(self) -> None:
        """Records the work that was left at the time limit."""
        within = f"within {self._options.time_limit:g} s; raise --time-limit"
        if not self._checked:
            doing = self._doing.get("what", "starting TensorFlow")
            self._end(f"the checks did not end {within} (during {doing})")
        elif self._parts:
            self._end(f"{', '.join(self._parts)} could not be measured {within}")
        self.is_over = True

    def close(self) -> None:
        """Shows the verdict, and writes the file."""
        self.report["seconds"] = round(time.monotonic() - self._begun, 1)
        self.report["faults"] = self.faults
        states = [check["status"] for check in self.report["checks"]]
        fit = len(states) - states.count("unfit")
        passed = f"{states.count('ok')} of {fit} checks passed"
        written = []
        if self._options.json is not None:
            text = json.dumps(self.report, indent=1) + "\n"
            self._options.json.write_text(text, encoding="utf-8")
            written = [f"Wrote {self._options.json}"]
        self._page.write(["", f"{passed}; {self.report['seconds']} s", *written])

    def _note_facts(self, event: Event) -> None:
        if "facts" in self.report:  # from an earlier process
            return
        self.report["made_on"] = event.pop("made_on")
        self.report["facts"] = event
        self._page.write(facts_lines(self.report))

    def _note_check(self, event: Event) -> None:
        head = [] if self.report["checks"] else ["", "checks"]
        self.report["checks"].append(event)
        self._page.write([*head, check_line(event)])
        if event["status"] == "wrong":
            self._failed.append(event["name"])
            self.faults.append(f"{event['name']}: {event['said']}")

    def _note_part(self, kind: str, event: Event) -> None:
        self.report[kind] = event["rows"] if kind != "scaling" else event
        self._parts.remove(kind)
        self._page.write(["", *PARTS[kind](self.report[kind])])

    def note_loss(self, how: str) -> None:
        """Drops the lost check, or the part that the lost measurement belongs to."""
        what = self._doing.get("what")
        if what is None:
            self._end(f"starting TensorFlow: {how}")
        elif self._doing["checks"]:
            lost = {"name": what, "status": "wrong", "said": how, "seconds": None}
            self._note_check(lost)
        else:
            self._end(f"{what}: {how}", is_over=False)
            self._parts = self._parts[1:]
        self._doing = {}
        self.is_over = self.is_over or (self._checked and not self._parts)

    def _end(self, fault: str, *, is_over: bool = True) -> None:
        self.faults.append(fault)
        self.is_over = self.is_over or is_over

    def _share(self, event: Event) -> float:
        """Returns the share of work done; by the clock, once the checks are made."""
        if event["checks"]:
            return 0.3 * float(event["share"])
        done = 1 - self.left_s / float(self._options.time_limit)
        return max(0.3, min(0.99, done / _USED))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``tw-doctor``.

    Args:
      arguments: of the command line; by default, this process's. The first may be a
        command of another package, as ``model`` is of tw-keras.

    Returns:
      The exit status: 0; 1 if a check or measurement failed; 130 after Ctrl-C; or
      that of the other package's command.

    Raises:
      TypeError: ``arguments`` are not strings.
      SystemExit: the command line is wrong (2), or SIGTERM arrived (143).
    """
    if arguments is not None:
        for argument in check_list(arguments=arguments, empty=True):
            check_text(argument=argument, empty=True)
    given = sys.argv[1:] if arguments is None else list(arguments)
    for point in entry_points(group=_COMMANDS, name=given[0] if given else ""):
        return int(point.load()(given[1:]))
    if given[:1] == ["model"]:
        _say("the command model is a part of tw-keras, which is not installed.")
        return 2
    options = parse(arguments)
    page = Page()
    examination = Examination(options, page)
    try:
        with _ending_on_sigterm():
            while not examination.is_over:
                _follow_one_process(examination, options.timeout)
            examination.close()
    except (KeyboardInterrupt, SystemExit) as end:  # Ctrl-C, or SIGTERM
        page.clear()
        _say("interrupted; nothing was written")
        if isinstance(end, SystemExit):
            raise
        return _INTERRUPTED
    except BrokenPipeError:  # the report's reader is gone
        sys.stdout = None  # nothing more to flush
        return 1
    if examination.faults:
        count = len(examination.faults)
        problems = "problem" if count == 1 else "problems"
        _say(f"{count} {problems}: {'; '.join(examination.faults)}.")
        return 1
    return 0


def _follow_one_process(examination: Examination, timeout_s: float) -> None:
    """Handles the events of one examining process, until it ends or must be killed."""
    with tempfile.TemporaryFile() as said, _examiner(examination.job(), said) as one:
        events = _events_of(one)
        bound_s = max(_STARTS_WITHIN_S, timeout_s)  # it imports TensorFlow first
        while not examination.is_over:
            if examination.left_s <= 0:
                examination.note_time()
                return
            try:
                event = events.get(timeout=max(0.0, min(bound_s, examination.left_s)))
            except Empty:
                if examination.left_s > 0:
                    examination.note_loss(f"did not end within {bound_s:g} s")
                    return
                continue
            if event is None:
                examination.note_loss(_how_it_ended(one, said))
                return
            examination.take(event)
            bound_s = timeout_s


@contextlib.contextmanager
def _examiner(job: Event, said: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the process that runs TensorFlow, and kills it afterwards."""
    with subprocess.Popen(
        [sys.executable, "-m", "tw_doctor._machine.examiner"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
        start_new_session=True,  # Ctrl-C goes to this process only
    ) as one:
        try:
            with contextlib.suppress(BrokenPipeError):
                pipe = cast("IO[bytes]", one.stdin)
                pipe.write(json.dumps(job).encode() + b"\n")
                pipe.flush()
            yield one
        finally:
            one.kill()


def _events_of(one: subprocess.Popen[bytes]) -> SimpleQueue[Event | None]:
    """Reads a process's events in a thread; None stands for its end."""
    events: SimpleQueue[Event | None] = SimpleQueue()

    def read() -> None:
        # A killed process may leave half a line, and a closed pipe.
        with contextlib.suppress(ValueError):
            for line in one.stdout or ():
                events.put(json.loads(line))
        events.put(None)

    threading.Thread(target=read, daemon=True).start()
    return events


def _how_it_ended(one: subprocess.Popen[bytes], said: Any) -> str:
    status = one.wait()
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()
    last = f" ({lines[-1][:300]})" if lines else ""
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}{last}"
    return f"its process ended with status {status}{last}"


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM end this process cleanly, so that it leaves none behind."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(_TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(what: str) -> None:
    print(f"tw-doctor: {what}", file=sys.stderr)
