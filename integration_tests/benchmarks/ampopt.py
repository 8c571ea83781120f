"""The cost of scaling, accumulating and skipping, beside optimizers without them.

Every contender trains the same variables by gradients that are given, so that what
is timed is the optimizer. Before anything is timed, each makes a few updates and
must reach the same variables as the plain optimizer.
"""

import time
from itertools import product
from typing import Any

from ampopt_contenders import (
    OURS,
    PLAIN,
    SIZES,
    Made,
    Size,
    count_operations,
    our_graph,
    our_keras,
    plain_graph,
    tensorflow_graph,
    their_keras,
)
from racing import Report, Timing, checked, race, ratio

import tw_core

OPTIONS = {
    "rounds": 21,
    "sizes": "ampopt_contenders.SIZES",
    "towers": [1, 4],
    "groups": [1, 8],
    "only": {"choices": ("graph", "function", "count", "weights")},
}

GROUP = 8
CHECKED_UPDATES = 2
RACE_S = 8.0  # of a cell, in which there are at least so many rounds:
FEWEST_ROUNDS = 5


def race_graph(
    size: Size, num_towers: int, multiplier: int | None, rounds: int
) -> list[Timing]:
    """Races in session graphs; with accumulation, a run is a whole group."""
    calls = multiplier or 1
    made = [
        plain_graph(size, num_towers, calls),
        our_graph(size, num_towers, calls, multiplier),
    ]
    if num_towers == 1 and multiplier is None:
        made.append(tensorflow_graph(size, calls))
    check(made[1:], made[0])
    made_of = f"{size}, {num_towers} tower{'s' * (num_towers > 1)}"
    return _race(f"graph, {made_of}, {_how(multiplier)}", made, PLAIN, rounds)


def race_function(size: Size, multiplier: int | None, rounds: int) -> list[Timing]:
    """Races Keras 3 optimizers in ``tf.function``."""
    calls = multiplier or 1
    made = [
        their_keras(size, calls, multiplier, scaled=True),
        our_keras(size, calls, multiplier),
        their_keras(size, calls, scaled=False),
    ]
    check(made[:2], made[2])
    work = f"tf.function, Keras Adam, {size}, {_how(multiplier)}"
    return _race(work, made, made[0].contender.name, rounds)


def race_weights(
    size: Size, num_towers: int, multiplier: int | None, rounds: int
) -> list[Timing]:
    """Races steps with and without weights, in session graphs."""
    options = (size, num_towers, multiplier or 1, multiplier)
    made = [our_graph(*options), our_graph(*options, weighs=True)]
    made_of = f"{size}, {num_towers} tower{'s' * (num_towers > 1)}"
    return _race(f"weights, {made_of}, {_how(multiplier)}", made, OURS, rounds)


def check(made: list[Made], plain: Made) -> None:
    """Makes every contender reach by runs what ``plain`` reaches by steps."""
    for _ in range(CHECKED_UPDATES):
        plain.step()
    want, within = plain.read(), {"rtol": 1e-5, "atol": 1e-6}
    for one in made:
        name, run = one.contender.name, one.contender.run
        checked(name, run, one.read, want, steps=CHECKED_UPDATES, **within)


def _race(work: str, made: list[Made], peer: str, rounds: int) -> list[Timing]:
    start = time.perf_counter()
    for one in made:
        one.contender.run()
    # A turn runs everybody twice; large cells have fewer of them.
    affordable = int(RACE_S / (2 * (time.perf_counter() - start)))
    rounds = max(min(FEWEST_ROUNDS, rounds), min(affordable, rounds))
    return race(work, [m.contender for m in made], peer=peer, rounds=rounds)


def main(options: Any, report: Report) -> None:
    """Races every cell, or those that the options name."""
    tw_core.use_logical_cpus(max(options.towers))
    multipliers = [None if count == 1 else count for count in options.groups]
    if options.only in (None, "count"):
        _report_counts(report)
    for name, multiplier in product(options.sizes, multipliers):
        if options.only in (None, "graph"):
            for towers in options.towers:
                _report_graph(report, SIZES[name], towers, multiplier, options.rounds)
        if options.only in (None, "weights"):
            for towers in options.towers:
                work = race_weights(SIZES[name], towers, multiplier, options.rounds)
                report.add(work, OURS)
        if options.only in (None, "function"):
            _report_function(report, SIZES[name], multiplier, options.rounds)


def _report_graph(
    report: Report, size: Size, towers: int, multiplier: int | None, rounds: int
) -> None:
    timings = race_graph(size, towers, multiplier, rounds)
    report.add(timings, PLAIN)
    measured = ratio(timings, OURS)
    if multiplier is None:
        report.target(timings[0].work, measured, 1.35)
    elif size.floats == SIZES["20x1K"].floats:
        report.target(timings[0].work, measured, 1.0)


def _report_function(
    report: Report, size: Size, multiplier: int | None, rounds: int
) -> None:
    timings = race_function(size, multiplier, rounds)
    report.add(timings, timings[0].name)
    report.target(timings[0].work, ratio(timings, OURS), 1.0)


def _report_counts(report: Report) -> None:
    counts = count_operations(SIZES["600x1K"], GROUP)
    print(f"\ngraph operations, function bodies counted: {counts}")
    measured = counts[OURS] / counts[PLAIN]
    report.target("graph operations, Adam, 600 variables, group of 8", measured, 1.25)


def _how(multiplier: int | None) -> str:
    return "no accumulation" if multiplier is None else f"groups of {multiplier}"
