"""Tests of process groups as drills: what one run of a test need not show.

Each drill runs the tests of one fault of ranks, of Horovod's names or of a server's
clock in a process of their own. Whether they pass may depend on the order in which
ranks begin and end, so they are worth many trials, two at a time, on a busy machine.
"""

import sys
from pathlib import Path
from typing import Any

from harness.processes import Program
from harness.task_faults import Outcome

PACKAGES = Path(__file__).parents[2] / "packages"
DEADLINE_S = 400

_FILTERS = {
    "weights restored before a broadcast": ("horovod_keras", "restored_weights"),
    "copies of an optimizer": ("horovod_keras", "copies"),
    "two jobs at one address": ("joining", "two_jobs"),
    "independent collectives": ("horovod_ops", "independent"),
    "a batch that weighs nothing": ("uneven_ends", "without_any_batch or takes_part"),
    "a collective that needs ranks that are done": ("uneven_ends", "cannot_take_part"),
    "tensors without elements": ("horovod_ops", "no_elements or no_rows"),
    "ports that are taken": ("joining", "port"),
    "a server's clock that is set": ("steady_times", "clock"),
    "many agreements": ("matching", "keys or new_shapes or hundreds"),
    "names in unlike order": ("matching", "by_name or without_a_name"),
    "ranks in different collectives": ("matching", "compared"),
}
DRILLS = {f"groups: {name}": chosen for name, chosen in _FILTERS.items()}


def run_drill(context: Any, name: str, folder: Path) -> Outcome:
    """Runs the tests of a drill once."""
    del context, folder
    module, chosen = DRILLS[name]
    [file] = PACKAGES.glob(f"*/tests/test_{module}.py")
    ran = Program([sys.executable, "-m", "pytest", "-q", file, "-k", chosen])
    status = ran.finish(DEADLINE_S)
    failed = [line for line in ran.out.splitlines() if line.startswith("FAILED")]
    return Outcome(f"{status}: {'; '.join(failed)}" if status else "")
