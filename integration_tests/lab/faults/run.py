"""Fault drills: harms tasks of real clusters, and checks that they recover or report.

The drills and their checks are in ``task_faults`` (with parameter servers),
``rank_faults`` (process groups, "processes: ..."), ``hangs`` (everything with bounded
waits, "hangs: ..."), ``host_drills`` (hosts whose network is cut, "hosts: ...") and
``doors`` (strangers at all ports of a run, "doors: ...").
Run by the nox session ``faults``:

    nox -s faults -- --trials 20
    nox -s faults -- --trials 20 --drill processes
    nox -s faults -- --trials 20 --drill hangs --ledger docs/benchmarks/hangs.tsv
    nox -s faults -- --total 1000 --ledger docs/benchmarks/syncrep-faults.tsv

With a ledger, trials in it count: a run can be stopped at any time, and resumed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.faults.ledger import GOOD, Ledger, Line, choose, summarize

ROOT = Path(__file__).parents[3]
SOURCE = "packages/tw-syncrep/src"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def main() -> int:
    """Runs the trials and tells how many were good."""
    from harness.processes import make_template

    arguments = read_arguments()
    ledger = Ledger(arguments.ledger)
    template = make_template()
    names = possible(arguments.drill, template)
    drills = Drills(template, names, ledger, arguments.trials, arguments.total)
    began, before = time.monotonic(), len(ledger.lines)
    lanes = [threading.Thread(target=drills.run) for _ in range(arguments.at_once)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    lines = [line for line in ledger.lines if line.drill in names]
    for family in families():
        own = [name for name in names if find_family(name) is family]
        if own:
            here = [line for line in lines if line.drill in own]
            tells_lost = family is families()[0]
            print(summarize(here, grid(own), tells_lost=tells_lost))
    minutes, fresh = (time.monotonic() - began) / 60, ledger.lines[before:]
    print(f"{len(fresh)} trials in {minutes:.0f} min; {len(lines)} in all")
    return 0 if all(line.is_good for line in fresh) else 1


def read_arguments() -> argparse.Namespace:
    """Reads the command line; without a total, there are as many trials of each."""
    from harness.task_faults import SCENES

    servers, *others = [list(family.DRILLS) for family in families()]
    known = [*servers, *SCENES, *(name for names in others for name in names)]
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog=f"Drills: {'; '.join(known)}."
    )
    parser.add_argument("--trials", type=int, help="trials per drill; 20 by default")
    parser.add_argument("--total", type=int, help="total number of trials, in turn")
    parser.add_argument("--ledger", type=Path, help="file with one line per trial")
    parser.add_argument("--at-once", type=int, default=2, help="concurrent trials")
    parser.add_argument(
        *("--drill", "--fault"),
        nargs="+",
        help="only drills whose names contain one of these",
    )
    arguments = parser.parse_args()
    if arguments.trials is None and arguments.total is None:
        arguments.trials = 20
    parts = arguments.drill or [""]
    arguments.drill = [name for name in known if any(part in name for part in parts)]
    if not arguments.drill:
        parser.error(f"no drill's name contains {' or '.join(parts)}")
    return arguments


class Drills:
    """Trials that several threads run, each another one."""

    def __init__(
        self,
        template: Any,
        names: Sequence[str],
        ledger: Ledger,
        each: int | None,
        total: int | None,
    ) -> None:
        self._template = template
        self._names = names
        self._ledger = ledger
        self._each = each
        self._total = total
        self._code = find_code()
        self._lock = threading.Lock()
        self._under_way: list[str] = []

    def run(self) -> None:
        """Runs trials until there are enough."""
        while (name := self._begin()) is not None:
            line = self._try(name)
            with self._lock:
                self._under_way.remove(name)
                self._ledger.add(line)
            if not line.is_good:
                print(f"{name}: FAILED: {line.verdict}", flush=True)

    def _begin(self) -> str | None:
        with self._lock:
            lines = [line for line in self._ledger.lines if line.drill in self._names]
            name = choose(
                *(self._names, lines, self._under_way),
                each=self._each,
                total=self._total,
            )
            if name is not None:
                self._under_way.append(name)
            return name

    def _try(self, name: str) -> Line:
        family = find_family(name)
        with tempfile.TemporaryDirectory() as folder:
            outcome = family.run_drill(self._template, name, Path(folder))
        remarks = outcome.remarks
        if outcome.failure:  # A busy machine makes errors late.
            remarks += (
                f" (load {os.getloadavg()[0]:.0f} on {os.cpu_count()} processors)"
            )
        return Line(
            name,
            outcome.failure or GOOD,
            outcome.beyond_s,
            outcome.longest_s,
            outcome.lost,
            self._code,
            remarks.strip(),
        )


def families() -> list[Any]:
    """Returns the modules that tell which drills there are."""
    from harness import rank_faults, task_faults
    from lab.faults import doors, hangs, host_drills

    return [task_faults, rank_faults, hangs, host_drills, doors]


def find_family(name: str) -> Any:
    """Returns the module that a drill is from."""
    servers, *others = families()
    return next((family for family in others if name in family.DRILLS), servers)


def possible(names: Sequence[str], template: Any) -> list[str]:
    """Returns the drills that this machine allows; says why it does not others."""
    from harness.task_faults import why_no_links
    from lab.faults.hosts import why_no_hosts

    linked = {name for name in names if is_linked(name)}
    on_hosts = {name for name in names if name.startswith("hosts: ")}
    left_out: set[str] = set()
    if linked and (reason := why_no_links(template)) is not None:
        print(f"Drills that cut links are skipped: {reason}", flush=True)
        left_out |= linked
    if on_hosts and (reason := why_no_hosts()) is not None:
        print(f"Drills between hosts are skipped: {reason}", flush=True)
        left_out |= on_hosts
    return [name for name in names if name not in left_out]


def is_linked(name: str) -> bool:
    """Returns whether a drill takes links down."""
    family = find_family(name)
    return hasattr(family, "is_linked") and bool(family.is_linked(name))


def grid(names: Sequence[str]) -> dict[tuple[str, str], dict[str, str]]:
    """Returns drills by what comes after, or by mode, by victim and fault."""
    from harness import rank_faults, task_faults

    rows: dict[tuple[str, str], dict[str, str]] = {}
    for name in names:
        if name in task_faults.DRILLS:
            drill = task_faults.DRILLS[name]
            rows.setdefault((drill.victim, drill.fault), {})[drill.after] = name
        elif name in rank_faults.DRILLS:
            of_ranks = rank_faults.DRILLS[name]
            row = rows.setdefault((of_ranks.victim, of_ranks.fault), {})
            row[of_ranks.mode] = name
    return rows


def find_code() -> str:
    """Returns which version of the package is tried: a short name of its sources."""
    git = ["git", "-C", str(ROOT)]
    asked = [["rev-parse", "--short", f"HEAD:{SOURCE}"], ["status", "-s", SOURCE]]
    try:
        name, changes = (
            subprocess.run(
                [*git, *words], capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}+" if changes else name


if __name__ == "__main__":
    sys.exit(main())
