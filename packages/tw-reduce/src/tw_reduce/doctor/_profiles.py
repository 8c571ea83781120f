"""The gradients and strategies that the doctor times: plain Python."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from tw_reduce._measured import Strategy
from tw_reduce.doctor._race import Time

THRESHOLDS = (0, 16_384, 1 << 20)
_SLOW = 2.0  # times the fastest
DEFAULT_BELOW = 16_384  # 4,096 elements of float32, which auto packs below


class Profile(NamedTuple):
    """A list of float32 gradients."""

    name: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def num_bytes(self) -> tuple[int, ...]:
        """Bytes of each gradient."""
        return tuple(4 * prod(shape) for shape in self.shapes)


def _residual_network() -> Iterator[tuple[int, ...]]:
    """ResNet-18: kernels, and two vectors of batch normalisation after each."""
    yield from ((7, 7, 3, 64), (64,), (64,))
    before = 64
    for width in (64, 128, 256, 512):
        for kernel in ((before, width), (width, width), (width, width), (width, width)):
            yield from ((3, 3, *kernel), (width,), (width,))
        if before != width:
            yield from ((1, 1, before, width), (width,), (width,))
        before = width
    yield from ((512, 1000), (1000,))


PROFILES = (
    Profile("100 of 4 KiB", ((1024,),) * 100),
    Profile("ResNet-18", tuple(_residual_network())),
    Profile("4 of 16 MiB", ((1 << 22,),) * 4),
)


def uniform(algorithms: Sequence[str], thresholds: Sequence[int]) -> list[Strategy]:
    """Returns strategies of one algorithm for all gradients, with every threshold."""
    return [Strategy(own, own, below) for below, own in product(thresholds, algorithms)]


def to_time(
    algorithms: Sequence[str],
    small: Mapping[Strategy, Time],
    large: Mapping[Strategy, Time],
) -> list[Strategy]:
    """Chooses the strategies to time on a list, promising ones first.

    ``small`` and ``large`` are the times on the lists of small and of large gradients,
    empty if there are none yet. Algorithms that took long on both are only packed.
    """
    if not (small and large):
        return uniform(algorithms, (DEFAULT_BELOW, 0))
    losses = [_losses_by_algorithm(times) for times in (small, large)]
    quick = [
        name
        for name in algorithms
        if min(own.get(name, math.inf) for own in losses) < _SLOW
    ]
    fastest = [min(own, key=own.__getitem__) for own in losses]
    return [
        *uniform(algorithms, (DEFAULT_BELOW,)),
        *uniform(quick, (0,)),
        *uniform(list(dict.fromkeys(fastest)), THRESHOLDS[-1:]),
        *(Strategy(fastest[0], fastest[1], below) for below in THRESHOLDS[1:]),
    ]


def _losses_by_algorithm(times: Mapping[Strategy, Time]) -> dict[str, float]:
    """Returns each algorithm's best time / that of the fastest."""
    fastest = min(own.ratio for own in times.values())
    found: dict[str, float] = {}
    for strategy, own in times.items():
        loss = own.ratio / fastest
        found[strategy.small] = min(loss, found.get(strategy.small, math.inf))
    return found


def treatment(strategy: Strategy, num_bytes: Sequence[int]) -> tuple[object, ...]:
    """Returns a key shared by strategies that treat a list of gradients the same.

    For example all with the same ``large``, if every gradient is above the threshold.
    """
    below = strategy.below_bytes
    return tuple(
        (strategy.small, True) if size < below else (strategy.large, False)
        for size in num_bytes
    )
