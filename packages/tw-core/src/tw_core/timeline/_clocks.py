"""Aligning the clocks of several tasks by what happened before what.

A tensor arrives after it was sent, and nobody leaves a collective before all have come:
each such pair bounds the difference between two clocks from one side, and messages in
both directions bound it from both, as in the network time protocol.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple


class Before(NamedTuple):
    """Something on one clock that happened before something on another.

    Attributes:
      first: the clock (task) of the earlier event.
      first_time: seconds on it.
      then: the clock of the later event.
      then_time: seconds on it.
    """

    first: str
    first_time: float
    then: str
    then_time: float


def align_clocks(
    befores: Iterable[Before], clocks: Iterable[str], reference: str
) -> dict[str, float]:
    """Returns what to add to each clock so that all agree with the reference.

    What lies between the bounds keeps every order. The middle is taken, and of bounds
    from one side alone the value nearest to what the clock shows; clocks that nothing
    connects keep their time. The clock with the narrowest bounds comes first.

    Args:
      befores: what happened before what, in any order.
      clocks: the names of all clocks.
      reference: the clock that stays as it is.

    Returns:
      {clock: seconds to add}.
    """
    names = sorted({reference, *clocks})
    # least[a, b]: the least that b's clock needs more than a's, over any other clocks.
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
