"""Why a device was idle: the reason of each gap, if that is known."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tw_doctor._timeline.intervals import (
    Arrival,
    Interval,
    RecordedStep,
    Span,
    clipped,
    gaps,
    length,
    union,
)
from tw_doctor._timeline.parts import cargo_of, is_read, producer_of, tower_of

_SHORT = 20e-6  # seconds: a device's own bookkeeping between two ops
_EXACT = 1e-6  # seconds: times are no more exact
_LEAST = 0.1  # of a gap: a stretch of it that counts as a wait of its own
CALL = "the call (Python, dispatch)"
BETWEEN = "the program between steps (input, Python)"
PROGRAM = "the program inside the step (Python)"
CORES = "a free core (or operations too short to record)"
RETURN = "the call's return"


@dataclass(frozen=True)
class Wait:
    """A gap in the work of a device.

    Attributes:
      device: canonical device string.
      start: seconds.
      end: seconds.
      why: the reason; ``""`` if it is not known.
    """

    device: str
    start: float
    end: float
    why: str


def waits(step: RecordedStep, device: str) -> list[Wait]:
    """Returns the gaps of a device in a step, by start.

    Until the first operation of any device, a gap is the call's. Until the last tensor
    from another device was ready, it waited for that. From then on, or if none arrived,
    the next operation could have begun, and waited for a thread or core. Stretches of
    less than a tenth of a gap count with the one before or after.

    Args:
      step: the recorded step.
      device: canonical device string.
    """
    own = step.on(device)
    spans = [(interval.start, interval.end) for interval in own]
    reasons = _Reasons(step, device, own)
    return [
        Wait(device, *wait)
        for within in pairwise((step.begin, step.start, reasons.begun, step.end))
        for gap in gaps(spans, within)
        for wait in _joined(reasons.of(*gap), _LEAST * (gap[1] - gap[0]))
    ]


def explained(step: RecordedStep) -> float:
    """Returns the share of a step's wall time whose cause is known.

    Measured on the device that ends last: the time of its operations, and of its waits
    with a known reason, over the wall time. It is 0 if no device is known.
    """
    device = step.last_device
    if not device:
        return 0.0
    spans = [(own.start, own.end) for own in step.on(device)]
    spans += [(w.start, w.end) for w in waits(step, device) if w.why]
    return length(clipped(spans, (step.begin, step.end))) / step.seconds


_Stretch = tuple[float, float, str]  # start, end, why


def _joined(stretches: Sequence[_Stretch], least: float) -> list[_Stretch]:
    """Joins neighbours of one reason; stretches too short get that of a neighbour."""
    least = max(least, _SHORT)
    long = [own for own in stretches if own[1] - own[0] >= least] or [
        max(stretches, key=lambda own: own[1] - own[0])
    ]
    begins = [stretches[0][0], *(own[0] for own in long[1:])]
    ends = [*begins[1:], stretches[-1][1]]
    found: list[_Stretch] = []
    for start, end, (_, _, why) in zip(begins, ends, long, strict=True):
        first = found.pop()[0] if found and found[-1][2] == why else start
        found.append((first, end, why))
    return found


class _Reasons:
    """Finds the reasons of one device's gaps."""

    def __init__(self, step: RecordedStep, device: str, own: list[Interval]) -> None:
        self._step = step
        self._device = device
        arrivals = [a for a in step.arrivals if a.device == device]
        self._arrivals = sorted(arrivals, key=lambda arrival: arrival.time)
        self._times = [arrival.time for arrival in self._arrivals]
        self._first = own[0].start if own else step.end
        self._last = max((interval.end for interval in own), default=step.start)
        known = [o.start for o in step.intervals if o.device and o.start >= step.start]
        self.begun = min(known, default=step.end)
        self._ends: dict[tuple[str, str], list[float]] = defaultdict(list)
        for one in step.intervals:
            self._ends[one.device, one.name].append(one.end)

    def of(self, start: float, end: float) -> list[_Stretch]:
        """The waits that a gap consists of."""
        step = self._step
        if end <= step.start:
            return [(start, end, self._between(start, end))]
        if end <= self.begun:
            return [(start, end, CALL)]
        if start >= self._last:
            return self._after_all(start, end)
        first, after = (bisect_right(self._times, at) for at in (start, end + _EXACT))
        arrivals = self._arrivals[first:after]
        if not arrivals or arrivals[-1].time <= start + _SHORT:
            return [(start, end, self._without_arrival(start, end))]
        return self._until(arrivals, start, end)

    def _without_arrival(self, start: float, end: float) -> str:
        if end <= self._first:
            return CALL
        calls = [(call.start, call.end) for call in self._step.calls]
        in_calls = length(clipped(calls, (start, end)))
        # Nothing arrived, so the next operation could have begun: its thread or core
        # was busy elsewhere.
        return PROGRAM if calls and in_calls < 0.5 * (end - start) else CORES

    def _between(self, start: float, end: float) -> str:
        """Names the call that took most of the time between steps, if recorded."""
        spent: dict[str, float] = {}
        for call in self._step.calls:
            for a, b in clipped([(call.start, call.end)], (start, end)):
                spent[call.name] = spent.get(call.name, 0.0) + (b - a)
        most = max(spent, key=lambda name: spent[name], default="")
        if not most or spent[most] < 0.5 * (end - start):
            return BETWEEN
        return f"{BETWEEN}: {most}"

    def _until(
        self, arrivals: Sequence[Arrival], start: float, end: float
    ) -> list[_Stretch]:
        """The waits of a gap in which tensors arrived, by their time."""
        last = arrivals[-1]
        # CPUs of one task fetch nothing: a tensor that was sent waits for a thread.
        idle = [
            (own.sent, own.time)
            for own in arrivals
            if _share_memory(self._device, own.source)
        ]
        ends = self._ends[last.source, producer_of(last.name)]
        made = max((end for end in ends if end <= last.sent), default=last.sent)
        idle.append((made, last.sent))  # its sending waited for one, too
        idle = union(clipped([*idle, (last.time, end)], (start, end)))
        found = [(*span, CORES) for span in idle]
        for own in gaps(idle, (start, end)):
            then = [one for one in arrivals if one.sent >= own[1] - _EXACT]
            ended_by = min(then, key=lambda one: one.sent, default=last)
            found.append((*own, self._waited_for(ended_by, *own)))
        return sorted(found)

    def _waited_for(self, arrival: Arrival, start: float, ready: float) -> str:
        if not arrival.source:
            return ""
        name = producer_of(arrival.name)
        tower = tower_of(name)
        cargo = cargo_of(name)
        busy, of_busy = self._busiest_part(arrival.source, start, ready)
        is_idle = cargo == "other" or name.endswith("_control_node")
        is_idle |= is_read(name) and cargo != "variables"
        if is_idle and busy:  # the work there, after which the tensor was made
            cargo, tower = busy, of_busy
        elif cargo in ("forward", "variables") and busy == "input":
            cargo, tower = busy, None
        elif "PartitionedCall" in name.rpartition("/")[2]:  # all of a tower's results
            cargo = busy or cargo
        whose = "" if tower is None else f"tower {tower}'s "
        return f"{whose}{cargo} from {short_device(arrival.source)}"

    def _busiest_part(
        self, device: str, start: float, end: float
    ) -> tuple[str, int | None]:
        """The part, with its tower, that a device did for most of a span; or ``""``."""
        spans: dict[tuple[str, int | None], list[Span]] = {}
        for own in self._step.on(device):
            inside = clipped([(own.start, own.end)], (start, end))
            spans.setdefault((own.part, own.tower), []).extend(inside)
        most = max(spans, key=lambda key: length(spans[key]), default=("", None))
        is_most = most[0] and length(spans[most]) > 0.5 * (end - start)
        return most if is_most else ("", None)

    def _after_all(self, start: float, end: float) -> list[_Stretch]:
        step, device = self._step, self._device
        last = max(step.on(step.last_device), key=lambda own: own.end, default=None)
        if step.last_device in ("", device) or last is None or start >= last.end:
            return [(start, end, RETURN)]
        part, of_tower = self._busiest_part(last.device, start, last.end)
        if not part:
            part, of_tower = last.part, last.tower
        tower = "" if of_tower is None else f"tower {of_tower}'s "
        why = f"{tower}{part} on {short_device(last.device)} to end the step"
        return [(start, last.end, why), (last.end, end, RETURN)]


def short_device(device: str) -> str:
    """A device string without the prefix that all devices of a local run share."""
    return device.removeprefix("/job:localhost/replica:0/task:0")


def _share_memory(one: str, other: str) -> bool:
    """Whether two devices are CPUs of one task, which fetch nothing from each other."""
    tasks = {device.rpartition("/device:CPU:")[:2] for device in (one, other)}
    return len(tasks) == 1 and ("", "") not in tasks
