"""Choosing reducers by measurements of ``tw-doctor``: plain Python, no TensorFlow.

The doctor times whole reducers on three lists of gradients: many small ones, a mixture,
a few large ones. A user's list falls between them by the mean size of its gradients.
Each strategy's loss, its time / the fastest time, is interpolated there, and the
strategy with the least loss is chosen. On the three lists themselves that is the
fastest one, or one within 2 % of it. ``docs/design/doctor.md`` has the reasons.
"""

import json
import math
import os
import platform
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from tw_core.internal import check_text, check_whole_number

FORMAT = 1
ALGORITHMS = (
    *("sum_on_device", "sum_balanced", "sum_round_robin"),
    *("hierarchical", "sum_collective", "sum_nccl"),
)
# Where the timed sums are: left where they were added, or copied to every tower.
KEPT, COPIED = "auto", "all_reduce"
_AS_GOOD = 1.02
_AGAIN = "Write it again with `tw-doctor --json FILE`"


@dataclass(frozen=True)
class Strategy:
    """The algorithms that add a list of gradients, chosen by gradient size.

    Attributes:
      small: adds dense gradients of fewer than ``below_bytes``, joined into packs.
      large: adds the rest, each alone.
      below_bytes: 0 where nothing is packed.
    """

    small: str
    large: str
    below_bytes: int

    def __post_init__(self) -> None:
        """Refuses unknown algorithms.

        Raises:
          TypeError: a value of another type.
          ValueError: an unknown algorithm, or ``below_bytes`` is negative.
        """
        for algorithm in (self.small, self.large):
            check_text(algorithm=algorithm)
            if algorithm not in ALGORITHMS:
                raise ValueError(
                    f"Strategy: unknown algorithm {algorithm!r}; known are "
                    f"{', '.join(ALGORITHMS)}."
                )
        check_whole_number(below_bytes=self.below_bytes, at_least=0)

    def __str__(self) -> str:
        """The strategy as code, such as ``packed(sum_on_device, 16384)``."""
        if not self.below_bytes:
            return self.large
        small = f"packed({self.small}, {self.below_bytes})"
        return small if self.small == self.large else f"{small} and {self.large}"


@dataclass(frozen=True)
class MeasuredProfile:
    """The times of strategies on one list of gradients.

    Attributes:
      name: of the list, as displayed.
      num_bytes: of each gradient of one tower, dense; at least one, above 0.
      times: ``"auto"`` (sums stay where they were added) or ``"all_reduce"`` (a copy
        for every tower) -> strategy -> its time / that of one reference strategy.
    """

    name: str
    num_bytes: tuple[int, ...]
    times: Mapping[str, Mapping[Strategy, float]]

    @cached_property
    def log_mean_bytes(self) -> float:
        """log2 of the mean size of a gradient."""
        return math.log2(sum(self.num_bytes) / len(self.num_bytes))


@dataclass(frozen=True)
class Measurements:
    """Measurements of ``tw-doctor``, as far as a choice needs them.

    Attributes:
      devices: [K] the towers' devices, canonically spelt.
      made_on: the environment of the figures: ``"tensorflow"``, ``"tw-reduce"``,
        ``"processor"``, ``"cores"`` and ``"gpus"``, each as a string.
      profiles: at least one; some strategy has times on all of them.
    """

    devices: tuple[str, ...]
    made_on: Mapping[str, str]
    profiles: tuple[MeasuredProfile, ...]

    def __post_init__(self) -> None:
        """Refuses measurements from which no strategy can be chosen.

        Raises:
          ValueError: no strategy has times on all profiles.
        """
        for where in (KEPT, COPIED):
            timed = [set(profile.times[where]) for profile in self.profiles]
            if not timed or not set.intersection(*timed):
                raise ValueError(
                    f"Measurements: no strategy has times on all profiles for {where}; "
                    "leave out profiles, or time one strategy on all."
                )

    @property
    def thresholds(self) -> tuple[int, ...]:
        """All values of ``below_bytes`` that a choice may have."""
        found = {
            strategy.below_bytes
            for profile in self.profiles
            for times in profile.times.values()
            for strategy in times
        }
        return tuple(sorted(found))


Measured: TypeAlias = Measurements | Mapping[str, Any] | str | os.PathLike[str]
"""Measurements, the content of a file of ``tw-doctor --json``, or the file's path."""


def read_measurements(measured: Measured) -> Measurements:
    """Reads the file that ``tw-doctor --json FILE`` wrote.

    Args:
      measured: the file's path, or its content as ``json.load`` returns it;
        ``Measurements`` are returned as they are.

    Returns:
      The measurements.

    Raises:
      TypeError: neither a path nor a mapping.
      ValueError: not such a file, one of another format, or one without times.
      OSError: the file cannot be read.
    """
    return as_measurements(measured)


def as_measurements(measured: Measured) -> Measurements:
    """As ``read_measurements``, for another public function."""
    if isinstance(measured, Measurements):
        return measured
    if isinstance(measured, Mapping):
        return _parse(measured, "measured")
    if not isinstance(measured, str | os.PathLike):
        raise TypeError(
            "measured must be a path, or the content of tw-doctor's file; got "
            f"{type(measured).__name__}."
        )
    path = Path(measured)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is not JSON ({error}). {_AGAIN}.") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} is not a JSON object. {_AGAIN}.")
    return _parse(content, f"{path}")


def choose_strategy(
    measured: Measurements, num_bytes: Sequence[int], *, copies: bool
) -> Strategy:
    """Returns the strategy with the least loss on a tower's list of dense gradients.

    Among those within 2 % of the least, which no measurement can separate, the first in
    the file wins: the doctor begins with ``auto``'s own. Without sizes, or if all are
    0, the list counts as the one of the smallest gradients.
    """
    timed = [
        (weight, profile.times[COPIED if copies else KEPT])
        for weight, profile in _neighbours(measured.profiles, num_bytes)
    ]
    totals = {
        strategy: sum(
            weight * (own[strategy] / min(own.values())) for weight, own in timed
        )
        for strategy in timed[0][1]
        if all(strategy in own for _, own in timed)
    }
    least = min(totals.values())
    return next(own for own, loss in totals.items() if loss <= _AS_GOOD * least)


def described_here(tensorflow: str, gpus: Sequence[str]) -> dict[str, str]:
    """Describes this environment; ``gpus`` are the names of physical GPUs."""
    return {
        "tensorflow": tensorflow,
        "tw-reduce": version_of("tw-reduce"),
        "processor": _processor(),
        "cores": str(num_cores()),
        "gpus": ", ".join(gpus) or "none",
    }


def num_cores() -> int:
    """Counts the cores that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(usable(0)) if usable else os.cpu_count() or 1


def version_of(distribution: str) -> str:
    """Returns a distribution's version; ``""`` where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def check_made_for(
    measured: Measurements,
    devices: Sequence[str],  # canonically spelt
    here: Mapping[str, str],
) -> None:
    """Refuses measurements of other devices; warns of those from another machine."""
    if measured.devices != tuple(devices):
        raise ValueError(
            f"measured was taken on devices {list(measured.devices)}; got "
            f"{list(devices)}. Pass those, or measure these with `tw-doctor --towers "
            f"{len(devices)} --json FILE`."
        )
    others = [
        f"{name} {measured.made_on.get(name, '?')} instead of {own}"
        for name, own in here.items()
        if measured.made_on.get(name) != own
    ]
    if others:
        warnings.warn(
            f"measured was taken elsewhere: {'; '.join(others)}. Its choice may not be "
            f"the fastest here. {_AGAIN}.",
            stacklevel=4,
        )


def _neighbours(
    profiles: Sequence[MeasuredProfile], num_bytes: Sequence[int]
) -> list[tuple[float, MeasuredProfile]]:
    """Returns the profiles on both sides of a list, with weights that sum to 1."""
    ordered = sorted(profiles, key=lambda own: own.log_mean_bytes)
    total = sum(num_bytes)
    place = math.log2(total / len(num_bytes)) if total else -math.inf
    for low, high in pairwise(ordered):
        if low.log_mean_bytes <= place < high.log_mean_bytes:
            width = high.log_mean_bytes - low.log_mean_bytes
            up = (place - low.log_mean_bytes) / width
            return [(1 - up, low), *([(up, high)] if up else [])]
    outermost = ordered[0] if place < ordered[0].log_mean_bytes else ordered[-1]
    return [(1.0, outermost)]


def _parse(content: Mapping[str, Any], who: str) -> Measurements:
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{who} must have format {FORMAT} of tw-doctor; got "
            f"{content.get('format')!r}. {_AGAIN}."
        )
    if not content.get("reducers"):
        raise ValueError(
            f"{who} has no times of reducers: tw-doctor was not asked for them, or had "
            f"no time left. {_AGAIN}, without --checks-only."
        )
    try:
        return Measurements(
            devices=tuple(map(str, content["devices"])),
            made_on={str(k): str(v) for k, v in content["made_on"].items()},
            profiles=tuple(map(_profile, content["reducers"])),
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(
            f"{who} is damaged ({type(error).__name__}: {error}). {_AGAIN}."
        ) from error


def _profile(entry: Mapping[str, Any]) -> MeasuredProfile:
    sizes = tuple(entry["num_bytes"])
    if not sizes or not all(type(n) is int and 0 < n < 2**63 for n in sizes):
        raise ValueError(
            f"num_bytes of {entry['name']!r} must be above 0, and whole numbers"
        )
    times = {where: _times(entry["times"][where]) for where in (KEPT, COPIED)}
    return MeasuredProfile(str(entry["name"]), sizes, times)


def _times(rows: Sequence[Mapping[str, Any]]) -> dict[Strategy, float]:
    found: dict[Strategy, float] = {}
    for row in rows:
        strategy = Strategy(row["small"], row["large"], row["below_bytes"])
        ratio = row["ratio"]
        if type(ratio) not in (int, float) or not 0 < ratio < math.inf:
            raise ValueError(f"the ratio of {strategy} must be above 0 and finite")
        found[strategy] = float(ratio)
    if not found:
        raise ValueError("a list of times is empty")
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()
