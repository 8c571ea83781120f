"""What the programs of a soak share: their options, and how they tell what they do.

One variable, ``tally``, has another gradient on every rank or replica: 1, 2, and so on.
With a rate that is a power of two it moves by exactly their mean a step. A step that
was lost or applied twice would show, and so would one without a rank or with one twice.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from lab.soak.ledger import MARK

RATE = 0.125
ROWS = 32
REPORT_EVERY_S = 0.5
WAIT_S = 120.0  # a restart takes a minute on a machine that is busy


def start() -> tuple[Path, float]:
    """Tells that a program has begun; returns its folder, and its pause after steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds per step")
    options = parser.parse_args()
    tell("start", pid=os.getpid())
    return options.folder, options.pause


def tell(event: str, **facts: Any) -> None:
    """Prints a line of JSON behind a mark."""
    sys.stdout.write(f"{MARK}{json.dumps({'event': event, **facts})}\n")
    sys.stdout.flush()


def report(step: int, tally: float, size: int) -> None:
    """Tells the step, and whether as many were applied."""
    mean = (size + 1) / 2
    if tally != -RATE * mean * step:
        applied = -tally / RATE
        tell("fault", text=f"gradients of {applied}, not {mean} a step, at step {step}")
    tell("step", step=step)
