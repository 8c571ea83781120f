"""Timing reducers on lists of gradients, and copies between devices.

Gradients are held in variables on their towers' devices, and all results are returned:
TensorFlow prunes ops that lead to no result.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import tensorflow as tf

import tw_reduce
from tw_doctor._machine.race import Time, race
from tw_reduce import Reducer
from tw_reduce.internal import COPIED, KEPT, Strategy, below_on, reducers_on
from tw_reduce.plans import TensorInfo, plan_auto
from tw_reduce.reducers import CollectiveKeys

Doing = Callable[[str], object]
Times = Mapping[Strategy, Time]
_ROUNDS = 41
_TO_BUILD = 0.6  # of the time for a list; the rest is for its rounds
_COPIED_BYTES = (4, 1 << 26)
_NO_COPY = 1.5  # a copy takes longer than so many calls that copy nothing
# Bytes; auto packs float32 gradients below the second of each.
THRESHOLDS = (0, 16_384, 1 << 20)
THRESHOLDS_ON_GPUS = (0, 1 << 18, 16_384, 1 << 20)
_SLOW = 2.0  # times the fastest


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
# The mixture is last: the other lists show which strategies to try on it.
_IN_ORDER = (PROFILES[0], PROFILES[-1], *PROFILES[1:-1])


def measure_copies(
    devices: Sequence[str], doing: Doing, *, until: float
) -> list[dict[str, Any]]:
    """Times copies of 4 bytes and of 64 MiB from every device to every other.

    The latency is that of 4 bytes, less that of a call that copies nothing; None if not
    begun before ``until`` (of ``time.monotonic``). The rate is None where 64 MiB take
    no longer than nothing: the devices share a memory.
    """
    held = {
        (device, size): _held(tf.ones([size // 4]), device)
        for device in devices
        for size in _COPIED_BYTES
    }
    found = []
    for source in devices:
        for target in devices:
            if source == target:
                continue
            row: dict[str, Any] = {"from": source, "to": target}
            row |= {"latency_us": None, "gb_per_s": None}
            found.append(row)
            if time.monotonic() > until:
                continue
            doing(f"a copy from {source} to {target}")
            small, large = (
                _copier(held[source, size], target) for size in _COPIED_BYTES
            )
            here = _copier(held[source, _COPIED_BYTES[0]], source)
            times = race(
                {"here": here, "small": small, "large": large},
                "here",
                rounds=5,
                until=time.monotonic() + 0.2,
            )
            latency = max(0.0, times["small"].seconds - times["here"].seconds)
            moved = times["large"].seconds - times["here"].seconds
            is_copy = times["large"].ratio > _NO_COPY
            row["latency_us"] = round(1e6 * latency, 1)
            row["gb_per_s"] = (
                round(_COPIED_BYTES[1] / moved / 1e9, 2) if is_copy else None
            )
    return found


def measure_reducers(
    devices: Sequence[str], algorithms: Sequence[str], doing: Doing, *, until: float
) -> list[dict[str, Any]]:
    """Times every algorithm, alone and packed, on each list, as far as time allows."""
    adding = reducers_on(tuple(devices), CollectiveKeys())
    found: dict[str, dict[str, Times]] = {own.name: {} for own in PROFILES}
    thresholds = THRESHOLDS if below_on(devices, None) is None else THRESHOLDS_ON_GPUS
    places = [(where, own) for where in (KEPT, COPIED) for own in _IN_ORDER]
    for number, (where, profile) in enumerate(places):
        around = tw_reduce.broadcast if where == COPIED else lambda reducer: reducer
        small, large = (found[PROFILES[n].name].get(where, {}) for n in (0, -1))
        now = time.monotonic()
        found[profile.name][where] = _race_strategies(
            profile,
            {name: around(adding[name]) for name in algorithms},
            devices,
            [
                _default(devices, algorithms, thresholds[1]),
                *to_time(algorithms, small, large, thresholds),
            ],
            f"{profile.name}, {where}",
            doing,
            until=now + max(0.0, until - now) / (len(places) - number),
        )
    return [
        {
            "name": own.name,
            "num_bytes": list(own.num_bytes),
            "times": {
                where: _rows(own, times, thresholds)
                for where, times in found[own.name].items()
            },
        }
        for own in PROFILES
    ]


def whole_gradients(profile: Profile, device: str, tower: int) -> list[tf.Variable]:
    """Makes a tower's gradients, of whole numbers, so that sums are exact."""
    random = tf.random.Generator.from_seed(tower)
    return [
        _held(tf.cast(random.uniform(shape, -64, 64, tf.int32), tf.float32), device)
        for shape in profile.shapes
    ]


def timed_call(reducer: Reducer, held: Sequence[Sequence[tf.Variable]]) -> Any:
    """Returns a function that reduces the variables' values and waits for the sums."""

    def reduce() -> list[Any]:
        grads = []
        for tower in held:
            with tf.device(tower[0].device):
                grads.append([variable.read_value() for variable in tower])
        reduced = reducer(grads)
        return list({id(t): t for row in reduced for t in row}.values())

    call = tf.function(reduce, autograph=False)
    return lambda: ended(call())


def ended(results: Any) -> Any:
    """Waits until GPUs have done the work that a call only enqueued."""
    if tf.config.list_physical_devices("GPU"):
        tf.test.experimental.sync_devices()
    return results


def reducer_of(strategy: Strategy, reducers: Mapping[str, Reducer]) -> Reducer:
    """Builds a strategy's reducer from reducers by name."""
    below = strategy.below_bytes
    small = tw_reduce.packed(reducers[strategy.small], below_bytes=below)
    if strategy.small == strategy.large:
        return small
    made: Reducer = tw_reduce.partition(
        lambda info: "small" if (info.num_bytes or 0) < below else "large",
        {"small": small, "large": reducers[strategy.large]},
    )
    return made


def uniform(algorithms: Sequence[str], thresholds: Sequence[int]) -> list[Strategy]:
    """Returns strategies of one algorithm for all gradients, with every threshold."""
    return [Strategy(own, own, below) for below, own in product(thresholds, algorithms)]


def to_time(
    algorithms: Sequence[str],
    small: Mapping[Strategy, Time],
    large: Mapping[Strategy, Time],
    thresholds: Sequence[int] = THRESHOLDS,
) -> list[Strategy]:
    """Chooses the strategies to time on a list, promising ones first.

    ``small`` and ``large`` are the times on the lists of small and of large gradients,
    empty if there are none yet. Algorithms that took long on both are only packed.
    """
    default = thresholds[1]
    if not (small and large):
        return uniform(algorithms, (default, 0))
    losses = [_losses_by_algorithm(times) for times in (small, large)]
    quick = [
        name
        for name in algorithms
        if min(own.get(name, math.inf) for own in losses) < _SLOW
    ]
    fastest = [min(own, key=own.__getitem__) for own in losses]
    return [
        *uniform(algorithms, (default,)),
        *uniform(quick, (0,)),
        *uniform(list(dict.fromkeys(fastest)), thresholds[2:]),
        *(Strategy(fastest[0], fastest[1], below) for below in thresholds[1:]),
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
    """Returns a key shared by strategies that treat a list of gradients the same."""
    below = strategy.below_bytes
    return tuple(
        (strategy.small, True) if size < below else (strategy.large, False)
        for size in num_bytes
    )


def _race_strategies(
    profile: Profile,
    reducers: Mapping[str, Reducer],
    devices: Sequence[str],
    strategies: Sequence[Strategy],
    place: str,
    doing: Doing,
    *,
    until: float,
) -> Times:
    """Times strategies, one per treatment of the list; the first is the reference."""

    def began(strategy: Strategy) -> None:
        doing(f"{strategy} on {place}")

    held = [whole_gradients(profile, d, k) for k, d in enumerate(devices)]
    calls: dict[Strategy, Callable[[], object]] = {}
    treatments = set()
    begun = time.monotonic()
    for strategy in strategies:
        key = treatment(strategy, profile.num_bytes)
        is_late = time.monotonic() > begun + _TO_BUILD * (until - begun)
        if key in treatments or (calls and is_late):
            continue
        treatments.add(key)
        began(strategy)
        calls[strategy] = timed_call(reducer_of(strategy, reducers), held)
        calls[strategy]()
    return race(calls, strategies[0], rounds=_ROUNDS, until=until, began=began)


def _default(
    devices: Sequence[str], algorithms: Sequence[str], below_bytes: int
) -> Strategy:
    """Returns the choice of ``auto`` for float32 without measurements, if it fits."""
    info = TensorInfo(0, (1,), "float32", 4)
    (choice,) = plan_auto([info], devices).choices
    name = choice.algorithm if choice.algorithm in algorithms else algorithms[0]
    return Strategy(name, name, below_bytes)


def _rows(
    profile: Profile, times: Times, thresholds: Sequence[int]
) -> list[dict[str, Any]]:
    """Returns a row for each strategy that treats the list like one that was timed."""
    by_treatment = {treatment(own, profile.num_bytes): own for own in times}
    names = dict.fromkeys(
        own for strategy in times for own in (strategy.small, strategy.large)
    )
    rows = []
    for strategy in dict.fromkeys([*times, *uniform(list(names), thresholds)]):
        timed = by_treatment.get(treatment(strategy, profile.num_bytes))
        if timed is not None:
            own = vars(times[timed])
            rows.append(vars(strategy) | {k: own[k] for k in own if k != "times_s"})
    return rows


def _held(value: tf.Tensor, device: str) -> tf.Variable:
    with tf.device(device):
        return tf.Variable(value, trainable=False)


def _copier(held: tf.Variable, target: str) -> Callable[[], object]:
    source = held.device

    def copy() -> tf.Tensor:
        with tf.device(source):
            read = held.read_value()
        with tf.device(target):
            return tf.identity(read)

    call = tf.function(copy, autograph=False)
    return lambda: ended(call())
