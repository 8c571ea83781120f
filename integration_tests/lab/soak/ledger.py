"""What the tasks of a soak have told, and whether anything was lost.

Tasks print lines of JSON behind a mark; these classes read them, and know nothing of
processes.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MARK = "soak "


@dataclass
class Ledger:
    """The state of a cluster, from its lines."""

    # Task name -> its processes so far; the last one is the present one
    pids: dict[str, list[int]] = field(default_factory=dict)
    # Worker -> the global step that its present process told last
    steps: dict[str, int] = field(default_factory=dict)
    # Worker -> how often it told a higher step than before
    advances: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)  # what tasks told that must not be
    # Task name -> what it told at its end
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)

    def read(self, line: str) -> bool:
        """Takes in a line such as ``[worker 0] soak {"event": ...}``."""
        name, marked, text = line.partition(f"] {MARK}")
        if marked:
            self._note(name.removeprefix("["), json.loads(text))
        return bool(marked)

    def _note(self, task: str, told: dict[str, Any]) -> None:
        if told["event"] == "start":
            self.pids.setdefault(task, []).append(told["pid"])
            self.steps.pop(task, None)
        elif told["event"] == "fault":
            self.faults.append(f"{task}: {told['text']}")
        elif told["event"] == "end":
            self.ends[task] = told
        if "step" in told:
            if told["step"] > self.steps.get(task, told["step"]):
                self.advances[task] += 1
            self.steps[task] = told["step"]


@dataclass
class Kill:
    """One kill, and what came of it."""

    task: str  # the task killed
    at_s: float  # when, in seconds from the start of the run
    starts: int  # how many times the task had been started
    # Every worker's advances when the task was back; None before
    since: dict[str, int] | None = None
    # Seconds until every worker went on; None as long as one does not
    recovered_s: float | None = None

    def look(self, ledger: Ledger, workers: list[str], now_s: float) -> bool:
        """Tells whether the task is back and every worker has gone on since."""
        if self.since is None and len(ledger.pids[self.task]) > self.starts:
            self.since = {name: ledger.advances[name] for name in workers}
        if self.recovered_s is None and self.since is not None:
            gone_on = [ledger.advances[w] > count for w, count in self.since.items()]
            if all(gone_on):
                self.recovered_s = now_s - self.at_s
        return self.recovered_s is not None
