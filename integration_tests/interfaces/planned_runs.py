"""Runs of tests that a session is to make, handed over as a JSON file.

The session installs what a run names into its own environment; what to install was
decided and built here.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

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


def write_runs(runs: Sequence[PlannedRun], folder: Path) -> None:
    """Leaves the runs in ``folder`` for the session."""
    text = json.dumps([asdict(run) for run in runs], indent=2)
    (folder / FILE).write_text(f"{text}\n")
