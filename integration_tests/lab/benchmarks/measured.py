"""The measured choice against every reducer: on the doctor's lists, and others.

``tw-doctor`` measures first, in separate processes. Then ``measured=`` chooses, and its
choice races every reducer, alone and packed, independently of the doctor.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles import PROFILES, Profile, resnet50_shapes
from racing import (
    Contender,
    Report,
    Timing,
    in_own_process,
    paired_ratio,
    race,
)
from reduce import traced
from reduce_inputs import Arrays, Variables

import tw_core
import tw_reduce
from tw_doctor._machine.measuring import PROFILES as DOCTORS
from tw_doctor._machine.measuring import THRESHOLDS
from tw_doctor._machine.race import seconds_of
from tw_reduce._choosing import reducers_on
from tw_reduce.reducers import CollectiveKeys

OPTIONS = {"rounds": 31, "towers": [2, 4, 8], "lists": [""], "keep": None}

MEASURED, PLAIN = "measured", "without measurements"
OURS = (MEASURED, PLAIN)
AT_MOST = 1.05
HOPELESS = 1.6  # times the fastest in a first look
# Sizes between the doctor's lists, and of two kinds at once.
OTHERS = (
    Profile("ResNet-50, 161 tensors", resnet50_shapes()),
    Profile("60 tensors of 64 KiB", ((16_384,),) * 60),
    Profile("300 of 2 KiB and one of 64 MiB", (*((512,),) * 300, (1 << 24,))),
    PROFILES["small"],
)
LISTS = (*(Profile(own.name, own.shapes) for own in DOCTORS), *OTHERS)


@dataclass(frozen=True)
class Cell:
    """One table: a list of gradients, where sums are to be, how many towers."""

    profile: Profile
    copies: bool
    towers: int
    rounds: int
    file: Path

    def title(self) -> str:
        where = "all_reduce" if self.copies else "auto"
        return f"{where}, {self.profile.name}, K = {self.towers}"


def run_cell(cell: Cell) -> tuple[list[Timing], str]:
    """Builds and checks all, leaves the hopeless out, and races the rest."""
    devices = tw_core.use_logical_cpus(cell.towers)
    arrays = Arrays(cell.profile, cell.towers)
    variables = Variables(arrays)
    make = tw_reduce.all_reduce if cell.copies else tw_reduce.auto
    plans: list[Any] = []
    reducers = {
        MEASURED: make(devices, measured=cell.file, explain=plans.append),
        PLAIN: make(devices),
        **every_reducer(devices, cell.copies),
    }
    contenders, firsts = [], []
    for name, reducer in reducers.items():
        run, results = traced(lambda own=reducer: own(variables.grads()))
        arrays.check(name, results(), scale=1.0)
        contenders.append(Contender(name, run, config="tf.function"))
        firsts.append(min(seconds_of(run) for _ in range(4)))
    kept = [
        contender
        for contender, seconds in zip(contenders, firsts, strict=True)
        if contender.name in OURS or seconds < HOPELESS * min(firsts)
    ]
    timings = race(cell.title(), kept, peer=MEASURED, rounds=cell.rounds)
    return timings, plans[0].choices[-1].why


def every_reducer(devices: list[str], copies: bool) -> dict[str, Callable[..., Any]]:
    """Every algorithm that fits CPUs, with every threshold of the doctor."""
    found = {}
    for name, reducer in reducers_on(tuple(devices), CollectiveKeys()).items():
        if name == "sum_nccl":
            continue
        around = tw_reduce.broadcast(reducer) if copies else reducer
        for below in THRESHOLDS:
            title = f"packed({name}, {below})" if below else name
            found[title] = tw_reduce.packed(around, below_bytes=below)
    return found


def measure(towers: int, folder: Path) -> Path:
    """Has the doctor measure towers on CPUs."""
    file = folder / f"towers-{towers}.json"
    options = ["--device", "cpu", "--towers", str(towers), "--json", str(file)]
    subprocess.run([sys.executable, "-m", "tw_doctor", *options], check=True)
    return file


def main(options: Any, report: Report) -> None:
    """Races what measurements choose with every reducer."""
    with tempfile.TemporaryDirectory() as own:
        folder = Path(options.keep or own)
        for towers in options.towers:
            file = folder / f"towers-{towers}.json"
            if not (options.keep and file.exists()):
                file = measure(towers, folder)
            for profile in LISTS:
                if any(part in profile.name for part in options.lists):
                    for copies in (False, True):
                        cell = Cell(profile, copies, towers, options.rounds, file)
                        _note(report, *in_own_process(run_cell, cell))


def _note(report: Report, timings: list[Timing], why: str) -> None:
    report.add(timings, MEASURED)
    print(f"  measured: {why}")
    rivals = [own for own in timings if own.name != MEASURED]
    best = max(rivals, key=lambda own: paired_ratio(timings, MEASURED, own.name))
    report.compare(timings, MEASURED, best.name, AT_MOST)
