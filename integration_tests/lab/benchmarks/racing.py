"""Races contenders in one process: checked, interleaved, reported as paired ratios.

A shared machine drifts, so absolute times say little. Contenders take turns, in an
order that changes from round to round, and the figure to quote is the median over
rounds of (contender's time / peer's time in the same round), as in ``tw-doctor``.
"""

import contextlib
import json
import math
import multiprocessing
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from harness.processes import Peer

from tw_doctor._machine.race import race as take_turns
from tw_doctor._machine.race import seconds_of

OUT = Path("out/bench")
WAIT_S = 120.0  # for a process to answer
# Kind of the towers' devices; the benchmark `gpu` sets it for those that it starts.
DEVICE = os.environ.get("TOWERS_BENCH_DEVICE", "cpu")
Block = Callable[[int], float]  # runs steps on all processes; the slowest one's seconds
_T = TypeVar("_T")
_MIN_BLOCK_S = 0.02
_BLOCK_S = 0.25  # of steps on several processes


@dataclass(frozen=True)
class Contender:
    """Something to time."""

    name: str  # as shown
    run: Callable[[], Any]  # does the work once, and ends when it is done
    # A lower bound that does less than the work; never "the best"
    is_bound: bool = False
    config: str = ""  # the session configuration, or how it was called


@dataclass(frozen=True)
class Timing:
    """One row of a table; seconds for one run."""

    work: str
    name: str
    config: str
    is_bound: bool
    median_s: float
    quartiles_s: tuple[float, float]
    ratio: float  # median over the rounds of this time / the peer's time
    ratio_quartiles: tuple[float, float]
    rounds: int
    times_s: tuple[float, ...] = ()  # every round's time


@dataclass
class Report:
    """Collects the rows of one benchmark and writes them."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def add(self, timings: Sequence[Timing], peer: str) -> None:
        """Prints a table and keeps its rows."""
        print_table(timings, peer)
        self.rows += [asdict(timing) | {"peer": peer} for timing in timings]

    def race(self, peer: str, cell: Callable[..., list[Timing]], *args: Any) -> Any:
        """Calls ``cell``, which races, in its own process, and keeps its rows."""
        timings = in_own_process(cell, *args)
        self.add(timings, peer)
        return timings

    def compare(
        self, timings: Sequence[Timing], ours: str, theirs: str, at_most: float
    ) -> None:
        """Notes a target of (time of ours / time of theirs)."""
        measured = paired_ratio(timings, ours, theirs)
        self.target(f"{timings[0].work}: {ours} / {theirs}", measured, at_most)

    def target(self, work: str, measured: float, at_most: float) -> None:
        """Notes whether a target was met; nothing fails when it was not."""
        verdict = "met" if measured <= at_most else "MISSED"
        print(f"  target: {work}: {measured:.3f}, at most {at_most}: {verdict}")
        self.targets.append(
            {"work": work, "measured": measured, "at_most": at_most, "verdict": verdict}
        )

    def write(self) -> None:
        """Writes JSON below ``out/bench/``."""
        path = save(self.name, rows=self.rows, targets=self.targets, **self.notes)
        print(f"Wrote {path}")


def save(name: str, **content: Any) -> Path:
    """Writes JSON below ``out/bench/``, and what the machine is."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **content}, indent=2) + "\n")
    return path


def use_devices(count: int, *, tf32: bool = False) -> list[str]:
    """Makes the towers' devices in this process: logical CPUs, or GPUs.

    Products are of float32 unless ``tf32``, so that results can be compared.
    """
    import tensorflow as tf

    from tw_doctor._machine.examiner import make_towers

    tf.config.experimental.enable_tensor_float_32_execution(tf32)
    return make_towers(DEVICE, count)


def device_names(count: int) -> list[str]:
    """Names the devices that ``use_devices`` makes."""
    return [f"/{DEVICE}:{k}" for k in range(count)]


def race(
    work: str,
    contenders: Sequence[Contender],
    *,
    peer: str,
    rounds: int = 21,
    timer: Callable[[Contender], float] | None = None,
) -> list[Timing]:
    """Times contenders in turns.

    Each is already checked for its result. ``timer`` runs one once and returns its
    seconds, where a part of the run must not count; by default a block of calls of at
    least 20 ms counts.
    """
    own = {contender.name: contender for contender in contenders}
    times = take_turns(
        {name: contender.run for name, contender in own.items()},
        peer,
        rounds=rounds,
        hopeless=math.inf,
        block_s=_MIN_BLOCK_S,
        timer=timer and (lambda name: timer(own[name])),
    )
    return [
        _timing(work, c, times[c.name].times_s, times[peer].times_s) for c in contenders
    ]


def race_by(
    work: str,
    timers: dict[str, Callable[[], float]],
    *,
    peer: str,
    rounds: int,
    bounds: Sequence[str] = (),
    config: str = "",
) -> list[Timing]:
    """Races by name what returns its own seconds; some may be ``bounds``."""
    return race(
        work,
        [Contender(name, list, name in bounds, config) for name in timers],
        peer=peer,
        rounds=rounds,
        timer=lambda contender: timers[contender.name](),
    )


def checked(
    name: str,
    run: Callable[[], Any],
    values: Callable[[], Any],
    want: Sequence[Any],
    *,
    steps: int = 1,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    **options: Any,
) -> Contender:
    """Returns a contender that has the values wanted after some steps."""
    import numpy as np

    for _ in range(steps):
        run()
    for got, value in zip(values(), want, strict=True):
        np.testing.assert_allclose(got, value, rtol=rtol, atol=atol, err_msg=name)
    return Contender(name, run, **options)


def in_own_process(cell: Callable[..., _T], *args: Any) -> _T:
    """Calls ``cell`` in a fresh process, as TensorFlow's collectives need.

    A process whose devices once joined a collective group of one size cannot
    run a group of another; so each number of towers gets a process, in which
    all contenders of that number race.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(cell, *args).result()


@contextlib.contextmanager
def tasks() -> Iterator[Callable[..., Any]]:
    """Gives ``start(program, *arguments)``, which returns a new process.

    All processes are killed at the end.
    """
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:

        def start(program: Callable[..., None], *arguments: Any) -> Peer:
            peer = Peer(context, program.__name__, program, *arguments)
            stack.callback(peer.kill)
            return peer

        yield start


def ask(peers: Sequence[Peer], *message: Any) -> list[Any]:
    """Sends all processes a message at once, and returns their answers."""
    for peer in peers:
        peer.say(*message)
    return [peer.hear(WAIT_S) for peer in peers]


def make(peers: Sequence[Peer], name: str, steps: int) -> list[Any]:
    """Makes a contender in all processes; returns what each reads after some steps."""
    ask(peers, "make", name)
    ask(peers, "run", name, steps)
    return ask(peers, "read", name)


def blocks_in(peers: Sequence[Peer], names: Iterable[str]) -> dict[str, Block]:
    """Returns what runs blocks of contenders in all processes at once."""

    def block(name: str, steps: int) -> float:
        return max(ask(peers, "run", name, steps))

    return {name: partial(block, name) for name in names}


def block_of(step: Callable[[], Any]) -> Block:
    """Returns what runs a number of steps, and gives the seconds of all."""
    return lambda steps: seconds_of(step, steps) * steps


def answer(
    pipe: Any,
    make: Callable[[str], tuple[Any, Any]],
    block_of: Callable[[Any], Block] = block_of,
) -> None:
    """Obeys ``ask`` until the parent is gone: make, run a block of steps, read.

    ``make`` makes a contender by its name: its step, of which ``block_of`` makes
    blocks, and what reads a parameter.
    """
    made: dict[str, tuple[Any, Any]] = {}
    while True:
        try:
            command, name, *rest = pipe.recv()
        except EOFError:
            return
        if command == "make":
            step, read = make(name)
            made[name] = block_of(step), read
            pipe.send("made")
        else:
            run, read = made[name]
            pipe.send(run(*rest) if command == "run" else read())


def race_blocks(
    work: str, blocks: dict[str, Block], *, peer: str, rounds: int
) -> list[Timing]:
    """Races steps of which a block is run at a time, on all processes at once."""

    def timer_of(block: Block) -> Callable[[], float]:
        steps = min(max(3, int(_BLOCK_S / (block(5) / 5))), 300)
        return lambda: block(steps) / steps

    timers = {name: timer_of(block) for name, block in blocks.items()}
    return race_by(work, timers, peer=peer, rounds=rounds)


def paired_ratio(timings: Sequence[Timing], ours: str, theirs: str) -> float:
    """Returns the median over the rounds of (time of ours / time of theirs)."""
    by_name = {timing.name: timing.times_s for timing in timings}
    pairs = zip(by_name[ours], by_name[theirs], strict=True)
    return statistics.median(mine / other for mine, other in pairs)


def print_table(timings: Sequence[Timing], peer: str) -> None:
    """Prints rows with medians, quartiles and ratios to the peer."""
    width = max(len(timing.name) for timing in timings)
    print(f"\n{timings[0].work}  ({timings[0].rounds} rounds, ratio to {peer})")
    for timing in timings:
        low, high = timing.quartiles_s
        first, third = timing.ratio_quartiles
        print(
            f"  {timing.name:{width}}  {timing.median_s * 1e3:9.3f} ms"
            f"  [{low * 1e3:.3f} .. {high * 1e3:.3f}]"
            f"  {timing.ratio:6.3f} [{first:.3f} .. {third:.3f}]"
            f"{'  bound' if timing.is_bound else ''}  {timing.config}"
        )


def machine() -> dict[str, Any]:
    """Describes what the figures were taken on."""
    import numpy
    import tensorflow

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "tensorflow": tensorflow.__version__,
        "numpy": numpy.__version__,
    }


def memory_now(name: str) -> int:
    """Reads a line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor()


def _timing(
    work: str, contender: Contender, own: Sequence[float], peer: Sequence[float]
) -> Timing:
    ratios = [mine / theirs for mine, theirs in zip(own, peer, strict=True)]
    return Timing(
        work=work,
        name=contender.name,
        config=contender.config,
        is_bound=contender.is_bound,
        median_s=statistics.median(own),
        quartiles_s=_quartiles(own),
        ratio=statistics.median(ratios),
        ratio_quartiles=_quartiles(ratios),
        rounds=len(own),
        times_s=tuple(own),
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third
