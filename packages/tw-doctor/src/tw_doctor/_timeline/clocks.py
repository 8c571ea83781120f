"""Aligning the clocks of several tasks by the order of their events.

A tensor arrives after it was sent, and no task leaves a collective before all have
joined: each such pair bounds the difference between two clocks from one side, and
messages in both directions bound it from both, as in the network time protocol.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple


class Before(NamedTuple):
    """An event on one clock that happened before an event on another."""

    first: str
    first_time: float
    then: str
    then_time: float


def align_clocks(
    befores: Iterable[Before], clocks: Iterable[str], reference: str
) -> dict[str, float]:
    """Returns the seconds to add to each clock so that all agree with ``reference``.

    Any shift between the bounds keeps every order. The middle is taken or, with a bound
    on one side only, the smallest shift; unconnected clocks keep their time. The clock
    with the narrowest bounds is aligned first.
    """
    names = sorted({reference, *clocks})
    # least[a, b]: lower bound of shift[b] - shift[a], over any other clocks.
    least = {(a, b): -math.inf for a in names for b in names}
    for first, first_time, then, then_time in befores:
        pair = (first, then)
        least[pair] = max(least[pair], first_time - then_time)
    for over in names:
        for a in names:
            for b in names:
                indirect = least[a, over] + least[over, b]
                least[a, b] = max(least[a, b], indirect)
    shift = {reference: 0.0}
    while len(shift) < len(names):
        bounds = {
            name: (
                max(shift[known] + least[known, name] for known in shift),
                min(shift[known] - least[name, known] for known in shift),
            )
            for name in names
            if name not in shift
        }
        narrowest = min(bounds, key=lambda name: bounds[name][1] - bounds[name][0])
        shift[narrowest] = _between(*bounds[narrowest])
    return shift


def _between(low: float, high: float) -> float:
    if math.isfinite(low) and math.isfinite(high):
        return (low + high) / 2
    return min(max(0.0, low), high)
