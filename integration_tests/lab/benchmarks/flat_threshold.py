"""The largest size for which flat variables pay: a sweep over sizes.

Each table trains a chain of 24 square kernels of one size, alone and as one flat
variable, replicated and sharded; the ratio crosses 1 where flat variables no longer
pay.
"""

from typing import Any

import step
from racing import Report, Timing, race

import tw_core

OPTIONS = {"rounds": 15, "towers": [2, 4], "widths": [16, 32, 64, 90, 128, 181, 256]}

ALONE = "replicated"
KERNELS = 24
KINDS = (ALONE, "flat", "sharded", "flat sharded")


def run_cell(towers: int, width: int, mode: str, rounds: int) -> list[Timing]:
    """Races flat variables with variables alone, of one size."""
    tw_core.use_logical_cpus(towers)
    step.BELOW_BYTES = 4 * width * width + 1
    title = f"{KERNELS} kernels of {4 * width * width:,} bytes"
    work = step.Work(title, [width] * (KERNELS + 1), 8 * towers, biases=False)
    found = []
    for kind in KINDS:
        if mode == "session":
            built = step.graph_step(work, towers, kind, step.adam)
        else:
            built = step.function_step(work, towers, kind, with_keras=False)
        new = step.adam if mode == "session" else None
        found.append(step.checked(work, kind, built, mode, new))
    return race(f"{title}, {mode}, K = {towers}", found, peer=ALONE, rounds=rounds)


def main(options: Any, report: Report) -> None:
    """Sweeps the size of variables, flat and alone."""
    for mode in ("session", "tf.function"):
        for towers in options.towers:
            for width in options.widths:
                report.race(ALONE, run_cell, towers, width, mode, options.rounds)
