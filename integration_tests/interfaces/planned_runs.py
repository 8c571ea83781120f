"""Runs of tests that a session is to make, handed over as a JSON file.

The session installs what a run names into its own environment; what to install was
decided and built here.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

FILE = "runs.json"


@dataclass(frozen=True)
class PlannedRun:
    """One package's tests against chosen wheels.

    Attributes:
      package: whose tests.
      root: the tree that holds them, with the settings of that time.
      wheels: paths of all wheels that are installed for it.
    """

    package: str
    root: str
    wheels: tuple[str, ...]


class Planner(Protocol):
    """Plans the runs for a package of the checkout in ``root``.

    Wheels of the checkout are in ``dist``, and ``into`` is where others are left.
    """

    def __call__(
        self, root: Path, package: str, *, dist: Path, into: Path
    ) -> list[PlannedRun]:
        """Returns the runs; none where there is nothing to prove."""
        ...


def run_planner(prog: str, description: str | None, plan: Planner) -> int:
    """Runs a command that leaves the runs of a plan; returns 1 where planning fails."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("package")
    parser.add_argument("--dist", type=Path, required=True)
    parser.add_argument("--into", type=Path, required=True)
    options = parser.parse_args()
    try:
        runs = plan(Path.cwd(), options.package, dist=options.dist, into=options.into)
    except (RuntimeError, ValueError) as error:
        sys.stderr.write(f"{prog}({options.package}): {error}\n")
        return 1
    write_runs(runs, options.into)
    return 0


def write_runs(runs: Sequence[PlannedRun], folder: Path) -> None:
    """Leaves the runs in ``folder`` for the session."""
    text = json.dumps([asdict(run) for run in runs], indent=2)
    (folder / FILE).write_text(f"{text}\n")
