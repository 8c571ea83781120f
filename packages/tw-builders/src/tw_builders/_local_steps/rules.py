"""The ranks' reports of their local steps, and the decisions that follow.

Every rank has all reports, and makes the same decisions from them.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Report:
    """A rank's report at an averaging."""

    steps: float  # since the last averaging
    weight: float  # of their data, such as its rows
    has_more: bool  # Others may follow.
    stops: bool  # It asks all ranks to stop.

    def row(self) -> list[float]:
        """Returns the report as numbers."""
        return [float(value) for value in astuple(self)]


@dataclass(frozen=True)
class Averaging:
    """The decisions of all ranks."""

    shares: Sequence[float]  # [R] of the mean, which add up to 1
    lead: int  # the first rank of those that ran the most steps
    has_steps: bool  # A rank ran one since the last averaging.
    is_last: bool  # No other follows: no rank has more steps, or one asks to stop.
    stops: bool


def agree(
    reports: Sequence[Sequence[float]], before: Averaging | None = None
) -> Averaging:
    """Decides from the rows of all ranks' reports, [R][4].

    A rank's share is the weight of its data since the last averaging or, if no data has
    weight, its number of steps. Without any step the shares are those of ``before``.
    """
    steps, weights, more, stops = zip(*reports, strict=True)
    has_steps, asks = any(steps), any(stops)
    is_last = asks or not any(more)
    if not has_steps:
        shares = (1 / len(steps),) * len(steps) if before is None else before.shares
        lead = 0 if before is None else before.lead
        return Averaging(shares, lead, False, is_last, asks)
    counts = weights if any(weights) else steps
    total = sum(counts)
    shares = tuple(own / total for own in counts)
    return Averaging(shares, steps.index(max(steps)), True, is_last, asks)
