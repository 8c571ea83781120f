"""What reducers are timed on, and which strategies: plain Python."""

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
    """A list of gradients of float32."""

    name: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def num_bytes(self) -> tuple[int, ...]:
        """Of each gradient."""
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
    """One algorithm for all gradients, with every threshold."""
    return [Strategy(own, own, below) for below, own in product(thresholds, algorithms)]


def to_time(
    algorithms: Sequence[str],
    small: Mapping[Strategy, Time],
    large: Mapping[Strategy, Time],
) -> list[Strategy]:
    """Chooses what to time on a list, the promising strategies first.

    Args:
      algorithms: those that fit.
      small: the times on the list of small gradients; empty where there are none yet.
      large: the same of large gradients.

    Returns:
      Every algorithm packed below the default threshold, and alone; of those that took
      long on both lists the first only. With times of both also the fastest with the
      largest threshold, and the fastest on each together.
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
    """Each algorithm's best time over that of the fastest."""
    fastest = min(own.ratio for own in times.values())
    found: dict[str, float] = {}
    for strategy, own in times.items():
        loss = own.ratio / fastest
        found[strategy.small] = min(loss, found.get(strategy.small, math.inf))
    return found


def treatment(strategy: Strategy, num_bytes: Sequence[int]) -> tuple[object, ...]:
    """Returns a key that strategies share which do the same to a list of gradients.

    For instance all with one algorithm, where every gradient is above the threshold.
    """
    below = strategy.below_bytes
    return tuple(
        (strategy.small, True) if size < below else (strategy.large, False)
        for size in num_bytes
    )
