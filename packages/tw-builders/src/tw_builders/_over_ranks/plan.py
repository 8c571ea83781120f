"""Shards: which tower of which rank holds the optimizer's state of which rows.

A plan in plain Python, the same on all ranks. A variable belongs to one tower as a
whole, or, if it is larger than a fair share and may be cut, to several, by rows of its
first axis. Towers of all ranks get about the same number of bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, order=True)
class Shard:
    """A variable, or rows of it, of one tower."""

    rank: int
    tower: int
    variable: int
    rows: tuple[int, int] | None = None  # [first, end); None: all

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of this part of a variable."""
        if self.rows is None:
            return tuple(whole)
        return (self.rows[1] - self.rows[0], *whole[1:])


def plan_shards(
    shapes: Sequence[Sequence[int]],
    item_bytes: Sequence[int],
    may_cut: Sequence[bool],
    *,
    num_ranks: int,
    num_towers: int,
) -> tuple[Shard, ...]:
    """Gives each of [N] variables to a tower of a rank, or rows of it to several.

    Whole variables go to the tower with the fewest bytes so far, largest first. Those
    that are cut then fill all towers up to one level, in order. Sorted by rank, tower
    and variable.

    >>> plan_shards([[6, 2], [2]], [4, 4], [True, True], num_ranks=2, num_towers=1)
    (Shard(rank=0, tower=0, variable=0, rows=(0, 2)), \
Shard(rank=0, tower=0, variable=1, rows=None), \
Shard(rank=1, tower=0, variable=0, rows=(2, 6)))
    """
    sizes = [prod(own) * item for own, item in zip(shapes, item_bytes, strict=True)]
    seats = num_ranks * num_towers
    fair = sum(sizes) / seats
    cut = [
        n
        for n, size in enumerate(sizes)
        if may_cut[n] and size > fair and len(shapes[n]) and shapes[n][0] > 1
    ]
    loads, found = [0.0] * seats, list[tuple[int, int, tuple[int, int] | None]]()
    for n in sorted(set(range(len(sizes))) - set(cut), key=lambda n: (-sizes[n], n)):
        seat = min(range(seats), key=lambda seat: (loads[seat], seat))
        loads[seat] += sizes[n]
        found.append((seat, n, None))
    free = _room_below_level(loads, sum(sizes[n] for n in cut))
    found += _poured([(n, shapes[n][0], sizes[n]) for n in cut], free)
    return tuple(
        sorted(
            Shard(*divmod(seat, num_towers), variable, rows)
            for seat, variable, rows in found
        )
    )


def _room_below_level(loads: Sequence[float], total: float) -> list[float]:
    """Returns how much of ``total`` each seat gets, so that all reach one level."""
    left = sorted(loads)
    while left and left[-1] * len(left) - sum(left) > total:
        left.pop()  # fuller than the level
    level = (sum(left) + total) / len(left) if left else 0.0
    return [max(0.0, level - load) for load in loads]


def _poured(
    cut: Sequence[tuple[int, int, int]], free: Sequence[float]
) -> list[tuple[int, int, tuple[int, int] | None]]:
    """Cuts variables (place, rows, bytes), one after the other, to fill seats."""
    found, begins = list[tuple[int, int, tuple[int, int] | None]](), 0
    for place, rows, size in cut:
        first, filled = 0, 0.0
        for seat, room in enumerate(free):
            filled += room
            is_last = seat == len(free) - 1
            end = rows if is_last else round((filled - begins) * rows / size)
            end = min(rows, max(first, end))
            if end > first:
                whole = first == 0 and end == rows
                found.append((seat, place, None if whole else (first, end)))
            first = end
        begins += size
    return found
