"""Timing contenders that do the same work, in turns.

A machine drifts while it is measured, so absolute times say little. Contenders take
turns in an order that changes from round to round, so that none always follows the same
one, and each turn begins with a run that does not count: the contender before left
caches and the allocator in its own state. The result is the median over the rounds of
(time of this one / time of one reference in the same round). Contenders that are far
behind after the first rounds drop out.
"""

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

_Name = TypeVar("_Name", bound=Hashable)
_FIRST_ROUNDS = 5
_HOPELESS = 1.4
_BLOCK_S = 0.01


@dataclass(frozen=True)
class Time:
    """The result of a race for one contender."""

    seconds: float  # of one run, the median
    ratio: float  # the median over the rounds of its time / the reference's
    rounds: int  # in which it took part
    times_s: tuple[float, ...] = ()  # of each round


def race(
    contenders: Mapping[_Name, Callable[[], object]],  # return when the work is done
    reference: _Name,
    *,
    rounds: int,  # at most
    until: float = math.inf,  # of ``time.monotonic``; five rounds are run regardless
    hopeless: float = _HOPELESS,  # times the fastest; slower ones drop out
    began: Callable[[_Name], object] = lambda name: None,
    block_s: float = _BLOCK_S,  # a turn lasts so long, or one call
    timer: Callable[[_Name], float] | None = None,  # instead of blocks of calls
) -> dict[_Name, Time]:
    """Times contenders in turns; calls ``began`` whenever one's turn begins."""
    if timer is None:
        calls = {}
        for name, run in contenders.items():
            began(name)
            run()
            run()
            calls[name] = max(1, int(block_s / max(seconds_of(run), 1e-6)))

        def timer(name: _Name) -> float:
            contenders[name]()  # the one before leaves caches in its own state
            return seconds_of(contenders[name], calls[name])

    times: dict[_Name, list[float]] = {name: [] for name in contenders}
    active = list(contenders)
    for turn in range(rounds):
        if turn >= _FIRST_ROUNDS and time.monotonic() > until:
            break
        if turn == _FIRST_ROUNDS:
            best = {name: min(own) for name, own in times.items()}
            bound = hopeless * min(best.values())
            active = [n for n in active if n == reference or best[n] < bound]
        for place in turn_order(len(active), turn):
            began(active[place])
            times[active[place]].append(timer(active[place]))
    return _summaries(times, reference)


def _summaries(
    times: Mapping[_Name, list[float]], reference: _Name
) -> dict[_Name, Time]:
    """Returns medians; a contender that dropped out is rated by the fastest until then.

    Few rounds on a busy machine say little. The ratio of the best times of both in
    those rounds, times the faster one's ratio over all rounds, keeps their order.
    """
    last = len(times[reference])
    ratios = {
        name: _median_ratio(own, times[reference])
        for name, own in times.items()
        if len(own) == last
    }
    stayed = list(ratios)
    for name, own in times.items():
        if name not in ratios:
            rounds = len(own)
            fastest = min(stayed, key=lambda other: min(times[other][:rounds]))
            behind = min(own) / min(times[fastest][:rounds])
            ratios[name] = behind * ratios[fastest]
    return {
        name: Time(statistics.median(own), ratios[name], len(own), tuple(own))
        for name, own in times.items()
    }


def _median_ratio(own: list[float], reference: list[float]) -> float:
    pairs = zip(own, reference, strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def turn_order(count: int, turn: int) -> list[int]:
    """Orders the contenders of one round; start and stride change with the turn."""
    steps = [step for step in range(1, count + 1) if math.gcd(step, count) == 1]
    step = steps[turn % len(steps)]
    return [(turn + place * step) % count for place in range(count)]


def seconds_of(run: Callable[[], object], calls: int = 1) -> float:
    """Returns the seconds that one of some calls takes."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls
