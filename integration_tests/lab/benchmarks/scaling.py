"""Weak scaling: images per second on 1, 2, 4 and 8 towers, and 1, 2 and 4 processes.

Every tower and every process trains the same network on its own batch. Each run is
paired with an equal number of them that do not reduce, a bound set by cores and memory.
The distance to that bound is the cost of the reduction.
"""

import contextlib
import os
import statistics
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness.ports import find_free_ports
from racing import (
    Contender,
    Timing,
    answer,
    ask,
    blocks_in,
    in_own_process,
    race,
    race_blocks,
    save,
    tasks,
)

import tw_core
import tw_reduce
from tw_doctor._machine.scaling import CPU_SIZE, training_step

OPTIONS = {"towers": [1, 2, 4, 8], "processes": [1, 2, 4], "rounds": 31}

PEER = "1 reducing"
# Efficiency by number of GPUs, from what the sources list (docs/benchmarks/scaling.md).
ANCHORS = {
    "StyleGAN2, 8 V100": {1: 1.0, 2: 0.97, 4: 0.94, 8: 0.90},
    "Inception v3, 8 P100": {1: 1.0, 8: 0.99},
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    kind: str  # ``"towers"`` or ``"processes"``
    count: int  # of them
    per_second: float  # images of all
    bound_per_second: float  # of as many that do not reduce
    efficiency: float  # of ``count`` times what one does, the median of paired ratios
    of_bound: float  # of what those do that do not reduce, the same


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
    return race("weak scaling", contenders, peer=PEER, rounds=rounds)


def processes_cell(counts: list[int], rounds: int) -> list[Timing]:
    """Races all numbers of processes; a block begins in all that take part at once."""
    blocks = {}
    with contextlib.ExitStack() as stack:
        for count in counts:
            start = stack.enter_context(tasks())
            address = f"127.0.0.1:{find_free_ports(1)[0]}"
            ranks = [start(serve_rank, address, rank, count) for rank in range(count)]
            for name, block in blocks_in(ranks, ("reducing", "alone")).items():
                ask(ranks, "make", name)
                blocks[f"{count} {name}"] = block
        return race_blocks("weak scaling", blocks, peer=PEER, rounds=rounds)


def serve_rank(pipe: Any, address: str, rank: int, size: int) -> None:
    """Runs steps that reduce, and steps that do not, as one of the processes."""
    import tw_ranks

    group = tw_ranks.join(address, rank=rank, size=size)
    reducers = {"reducing": partial(tw_ranks.mean_across, group=group), "alone": None}
    cpu = ["/cpu:0"]
    answer(pipe, lambda n: (training_step(cpu, CPU_SIZE, reducers[n]), list))


def rows_of(kind: str, counts: list[int], timings: list[Timing]) -> list[Row]:
    """Returns a row for each count."""
    times = {timing.name: timing.times_s for timing in timings}
    rows = []
    for count in counts:
        own, alone = times[f"{count} reducing"], times[f"{count} alone"]
        pairs = list(zip(own, alone, times[PEER], strict=True))
        rows.append(
            Row(
                kind=kind,
                count=count,
                per_second=count * CPU_SIZE.batch / statistics.median(own),
                bound_per_second=count * CPU_SIZE.batch / statistics.median(alone),
                efficiency=statistics.median(
                    single / mine for mine, _, single in pairs
                ),
                of_bound=statistics.median(free / mine for mine, free, _ in pairs),
            )
        )
    return rows


def print_rows(rows: list[Row]) -> None:
    """Prints the table."""
    print("\n               images/s   bound     efficiency   of the bound")
    for row in rows:
        print(
            f"  {row.count} {row.kind:9} {row.per_second:10,.0f} "
            f"{row.bound_per_second:10,.0f} {row.efficiency:10.1%} {row.of_bound:10.1%}"
        )


def draw(rows: list[Row], path: Path, *, cores: int) -> None:
    """Draws images per second, beside those of as many that do not reduce.

    Small, so that the text can be read where the picture is as wide as a phone.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(5.0, 4.6), layout="constrained")
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
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9.5)
    title = f"Weak scaling on {cores} CPU cores:\none network and batch size per tower"
    axis.set_title(title, loc="left")
    figure.savefig(path, dpi=240)
    plt.close(figure)


def main(options: Any, _: object) -> None:
    """Measures how training scales over towers and over processes."""
    rows: list[Row] = []
    for kind, given, cell in (
        ("towers", options.towers, partial(in_own_process, towers_cell)),
        ("processes", options.processes, processes_cell),
    ):
        if given:
            counts = [1, *(count for count in given if count != 1)]
            rows += rows_of(kind, counts, cell(counts, options.rounds))
    print_rows(rows)
    kept = [asdict(row) for row in rows]
    path = save("scaling", size=asdict(CPU_SIZE), rows=kept, anchors=ANCHORS)
    cores = len(os.sched_getaffinity(0))
    draw(rows, path.with_suffix(".png"), cores=cores)
    print(f"Wrote {path} and {path.with_suffix('.png')}")
