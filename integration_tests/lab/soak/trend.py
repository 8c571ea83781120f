"""Whether what a process holds stays level: memory and file descriptors.

The middle of the last third of the samples is compared with that of the first, after
a warm-up. Middles, since one sample may catch a session being made anew.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

PROC = Path("/proc")
SHORTEST_S = 20.0
# How much more a process may hold at the end than after its warm-up: a share of its
# memory then, or so many bytes where that is little; and file descriptors.
RSS_SHARE, RSS_BYTES, DESCRIPTORS = 0.05, 24 << 20, 4


@dataclass(frozen=True)
class Sample:
    """What one process held at one time."""

    at_s: float  # seconds from the start of the run
    rss_bytes: int  # resident memory
    descriptors: int  # open file descriptors


def sample(pid: int, at_s: float) -> Sample | None:
    """Reads what a process holds; None where it is gone."""
    try:
        pages = int((PROC / str(pid) / "statm").read_text().split()[1])
        descriptors = len(os.listdir(PROC / str(pid) / "fd"))
    except (OSError, IndexError):
        return None
    if not pages:  # It has ended, and nobody has asked how.
        return None
    return Sample(at_s, pages * os.sysconf("SC_PAGE_SIZE"), descriptors)


@dataclass(frozen=True)
class Trend:
    """How a figure went after the warm-up."""

    level: float  # its middle in the first third of the time
    growth: float  # by how much its middle in the last third is above that
    per_minute: float  # growth over the time between the two
    samples: int  # how many there were


def measure(
    at_s: Sequence[float], figures: Sequence[float], *, warm_up_s: float
) -> Trend | None:
    """Measures a trend; None where little time is left after the warm-up."""
    kept = [pair for pair in zip(at_s, figures, strict=True) if pair[0] >= warm_up_s]
    third = len(kept) // 3
    if third == 0 or kept[-1][0] - kept[0][0] < SHORTEST_S:
        return None
    first, last = kept[:third], kept[-third:]
    level = median(figure for _, figure in first)
    growth = median(figure for _, figure in last) - level
    minutes = (median(at for at, _ in last) - median(at for at, _ in first)) / 60
    return Trend(level, growth, growth / minutes, len(kept))


def report(
    name: str, samples: Sequence[Sample], *, warm_up_s: float
) -> tuple[str, list[str]]:
    """Describes one process.

    Returns a line for the summary, and the faults: what grew beyond its bound.
    """
    at_s = [sample.at_s for sample in samples]
    rss = measure(at_s, [s.rss_bytes for s in samples], warm_up_s=warm_up_s)
    held = measure(at_s, [s.descriptors for s in samples], warm_up_s=warm_up_s)
    if rss is None or held is None:
        return f"{name}: {len(samples)} samples, too short to tell", []
    bound = max(RSS_SHARE * rss.level, RSS_BYTES)
    line = (
        f"{name}: {_mib(rss.level)} {_mib(rss.growth, '+')} "
        f"({_mib(rss.per_minute, '+')}/min, bound +{_mib(bound)}), "
        f"{held.level:g} descriptors {held.growth:+g} (bound +{DESCRIPTORS}), "
        f"{rss.samples} samples"
    )
    grown = [rss.growth > bound, held.growth > DESCRIPTORS]
    return line, [f"grew: {line}"] if any(grown) else []


def _mib(count: float, sign: str = "") -> str:
    return f"{count / (1 << 20):{sign}.1f} MiB"
