"""Weak scaling: images per second on 1, 2, 4 and 8 towers, and 1, 2 and 4 processes.

Every tower and every process trains the same network on a batch of its own. Beside each
run as many that do not reduce: cores and memory allow no more, whatever the reduction
costs. What the reduction costs is the distance to that bound.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from racing import Contender, Timing, in_own_process, race, save

import tw_core
import tw_reduce
from tw_doctor._machine.race import turn_order
from tw_doctor._machine.scaling import CPU_SIZE, training_step

OPTIONS = {
    "towers": [1, 2, 4, 8],
    "processes": [1, 2, 4],
    "rounds": 31,
    "cycles": 3,
    "blocks": 9,
}

HERE = Path(__file__).parent
STEPS = 8  # of a block between processes
DEADLINE_S = 300
# Efficiency by number of GPUs, from what the sources list (docs/benchmarks/scaling.md).
ANCHORS = {
    "StyleGAN2, 8 V100": {1: 1.0, 2: 0.97, 4: 0.94, 8: 0.90},
    "Inception v3, 8 P100": {1: 1.0, 8: 0.99},
}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
      kind: ``"towers"`` or ``"processes"``.
      count: of them.
      per_second: images of all.
      bound_per_second: of as many that do not reduce.
      efficiency: of ``count`` times what one does, the median of paired ratios.
      of_bound: of what those do that do not reduce, the same.
    """

    kind: str
    count: int
    per_second: float
    bound_per_second: float
    efficiency: float
    of_bound: float


def towers_cell(counts: list[int], rounds: int) -> list[Timing]:
    """Races all numbers of towers, reducing or not, in one process."""
    devices = tw_core.use_logical_cpus(max(counts))
    contenders = []
    for count in counts:
        own = devices[:count]
        means = tw_reduce.mean(tw_reduce.all_reduce(own))
        for name, reduce in (("reducing", means), ("alone", None)):
            step = training_step(own, CPU_SIZE, reduce)
            contenders.append(Contender(f"{count} {name}", step, config="tf.function"))
    return race("weak scaling", contenders, peer="1 reducing", rounds=rounds)


def tower_rows(counts: list[int], rounds: int) -> list[Row]:
    """Measures towers."""
    timings = in_own_process(towers_cell, counts, rounds)
    times = {timing.name: list(timing.times_s) for timing in timings}
    one = times["1 reducing"]
    return [
        _row("towers", k, times[f"{k} reducing"], times[f"{k} alone"], one)
        for k in counts
    ]


def process_rows(counts: list[int], cycles: int, blocks: int) -> list[Row]:
    """Measures processes: each number in turn, as often as there are cycles."""
    times: dict[int, list[dict[str, list[float]]]] = {count: [] for count in counts}
    for cycle in range(cycles):
        for place in turn_order(len(counts), cycle):
            times[counts[place]].append(launched(counts[place], blocks))
    joined = {
        count: {
            name: [value for launch in own for value in launch[name]]
            for name in ("reducing", "alone")
        }
        for count, own in times.items()
    }
    one = joined[counts[0]]["reducing"]
    return [
        _row("processes", count, own["reducing"], own["alone"], one)
        for count, own in joined.items()
    ]


def launched(count: int, blocks: int) -> dict[str, list[float]]:
    """Runs processes, and returns each block's seconds per step: of the slowest."""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, str(HERE / "scaling_rank.py")]
        program += [folder, str(blocks), str(STEPS)]
        launch = [sys.executable, "-m", "tw_launch", "--ps", "0"]
        launch += ["--workers", str(count), "--", *program]
        done = subprocess.run(
            launch, capture_output=True, text=True, timeout=DEADLINE_S
        )
        if done.returncode:
            raise RuntimeError(f"scaling: {count} processes failed:\n{done.stdout}")
        files = sorted(Path(folder).glob("*.json"))
        ranks = [json.loads(file.read_text()) for file in files]
    return {
        name: [max(own) for own in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ("reducing", "alone")
    }


def _row(
    kind: str, count: int, own: list[float], alone: list[float], one: list[float]
) -> Row:
    pairs = list(zip(own, alone, one, strict=True))
    return Row(
        kind=kind,
        count=count,
        per_second=count * CPU_SIZE.batch / statistics.median(own),
        bound_per_second=count * CPU_SIZE.batch / statistics.median(alone),
        efficiency=statistics.median(single / mine for mine, _, single in pairs),
        of_bound=statistics.median(free / mine for mine, free, _ in pairs),
    )


def print_rows(rows: list[Row]) -> None:
    """Prints the table."""
    print("\n               images/s   bound     efficiency   of the bound")
    for row in rows:
        print(
            f"  {row.count} {row.kind:9} {row.per_second:10,.0f} "
            f"{row.bound_per_second:10,.0f} {row.efficiency:10.1%} {row.of_bound:10.1%}"
        )


def draw(rows: list[Row], path: Path) -> None:
    """Draws images per second, beside those of as many that do not reduce."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8.4, 4.2), layout="constrained")
    for kind, color in {"towers": "#2a6f97", "processes": "#c8553d"}.items():
        own = [row for row in rows if row.kind == kind]
        counts = [row.count for row in own]
        for label, values, line in (
            (kind, [row.per_second for row in own], "o-"),
            (f"{kind} that do not reduce", [r.bound_per_second for r in own], "o--"),
        ):
            axis.plot(counts, values, line, color=color, label=label)
    counts = sorted({row.count for row in rows})
    axis.set_ylabel("images per second, of all")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("towers or processes")
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.grid(alpha=0.25)
    axis.legend(loc="lower right")
    axis.set_title("Weak scaling: a fixed network and batch per tower", loc="left")
    figure.savefig(path, dpi=180)
    plt.close(figure)


def main(options: Any, _: object) -> None:
    """Measures how training scales over towers and over processes."""
    rows: list[Row] = []
    if options.towers:
        rows += tower_rows(_from_one(options.towers), options.rounds)
    if options.processes:
        rows += process_rows(
            _from_one(options.processes), options.cycles, options.blocks
        )
    print_rows(rows)
    kept = [asdict(row) for row in rows]
    path = save("scaling", size=asdict(CPU_SIZE), rows=kept, anchors=ANCHORS)
    draw(rows, path.with_suffix(".png"))
    print(f"Wrote {path} and {path.with_suffix('.png')}")


def _from_one(counts: list[int]) -> list[int]:
    """Puts 1 first, to which all is compared."""
    return [1, *(count for count in counts if count != 1)]
