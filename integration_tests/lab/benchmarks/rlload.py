"""An epoch of training on one batch: loaded, or fed in other ways.

The models are small on purpose, so that moving rows dominates. Every contender runs the
same 32 steps of gradient descent from the same weights, on the same rows, and must
reach the same weights before anything is timed.
"""

from pathlib import Path
from typing import Any

import numpy as np
from racing import Contender, Report, Timing, in_own_process, memory_now, race
from rlload_contenders import EPOCH, FEEDING, STEPS, Functions, Session, TwoTowers
from rlload_works import WORKS, reference, reference_of_towers

import tw_core

OPTIONS = {"works": "rlload_works.WORKS", "rounds": 31}


def race_epochs(name: str, rounds: int) -> list[Timing]:
    """Races everything that takes an epoch."""
    work = WORKS[name]
    want = reference(work)
    contenders = [*Session(work).built(want), *Functions(work, want).built()]
    named = [
        Contender(f"{c.name} ({c.config})", c.run, config=c.config) for c in contenders
    ]
    return race(f"epoch, {work.name}", named, peer=named[0].name, rounds=rounds)


def race_towers(name: str, rounds: int) -> list[Timing]:
    """Races two towers with RLlib's."""
    tw_core.use_logical_cpus(2)
    work = WORKS[name]
    contenders = TwoTowers(work, reference_of_towers(work)).built()
    return race(
        f"two towers, {work.name}", contenders, peer=contenders[-1].name, rounds=rounds
    )


def race_loads(name: str, rounds: int) -> list[Timing]:
    """Races loading with a copy into memory that is warm."""
    session = Session(WORKS[name])
    warm = np.empty_like(session.x)
    contenders = [
        Contender("memory copy", lambda: np.copyto(warm, session.x), is_bound=True),
        Contender("load_data", session.load),
        Contender("the original's load", session.load_original),
    ]
    title = f"load, {WORKS[name].name}"
    return race(title, contenders, peer="memory copy", rounds=rounds)


def extra_memory(name: str, method: str) -> float:
    """Returns what four loads take at their peak beside the batch, in batches.

    Linux alone tells, and lets a process start its own peak anew.
    """
    session = Session(WORKS[name])
    load = getattr(session, method)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_now("VmRSS")
    for _ in range(4):
        load()
    return (memory_now("VmHWM") - before) / session.x.nbytes - 1


def note_targets(report: Report, name: str, epochs: list[Timing]) -> None:
    """Compares with what was aimed at."""
    report.compare(epochs, f"{EPOCH} (session)", f"{FEEDING} (session)", 1 / 1.5)
    original = "the original's step per call (session)"
    report.compare(epochs, f"{STEPS} (session)", original, 1)
    if WORKS[name].is_vectors:
        ours, function = f"{EPOCH} (tf.function)", "(tf.function)"
        for peer in ("tf.data range and slice", "tf.data range and slice, one call"):
            report.compare(epochs, ours, f"{peer} {function}", 1 / 2)


def note_loads(report: Report, name: str, rounds: int) -> None:
    """Times loads, and compares them and their memory with what was aimed at."""
    loads = report.race("memory copy", race_loads, name, rounds)
    report.compare(loads, "load_data", "memory copy", 1.5)
    theirs = in_own_process(extra_memory, name, "load_original")
    print(f"  extra memory of the original's load: {theirs:.3f} batches")
    ours = in_own_process(extra_memory, name, "load")
    report.target("load, extra memory in batches", ours, 0.1)


def main(options: Any, report: Report) -> None:
    """Runs the benchmark."""
    for name in options.works:
        epochs = in_own_process(race_epochs, name, options.rounds)
        report.add(epochs, epochs[0].name)
        note_targets(report, name, epochs)
    for name in options.works:
        towers = in_own_process(race_towers, name, options.rounds)
        report.add(towers, towers[-1].name)
        if len(towers) > 1:
            report.compare(towers, towers[0].name, towers[-1].name, 1)
    if "images" in options.works:
        note_loads(report, "images", options.rounds)
