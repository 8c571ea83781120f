"""Why a device was idle: the reason of each gap, if that is known."""

from bisect import bisect_right
from dataclasses import dataclass

from tw_doctor._timeline.intervals import (
    Arrival,
    Interval,
    RecordedStep,
    Span,
    clipped,
    gaps,
    length,
)
from tw_doctor._timeline.parts import cargo_of, producer_of, tower_of

_SHORT = 20e-6  # seconds: a device's own bookkeeping between two ops
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

    Until the last tensor from another device arrived, a gap waited for that. From then
    on, or if none arrived, the next operation was ready and waited for a thread or
    core.

    Args:
      step: the recorded step.
      device: canonical device string.
    """
    own = step.on(device)
    spans = [(interval.start, interval.end) for interval in own]
    reasons = _Reasons(step, device, own)
    return [
        Wait(device, *wait)
        for within in ((step.begin, step.start), (step.start, step.end))
        for gap in gaps(spans, within)
        for wait in reasons.of(*gap)
    ]


def explained(step: RecordedStep) -> float:
    """Returns the share of a step's wall time whose cause is known.

    Measured on the device that ends last: the time of its operations, and of its waits
    with a known reason, over the wall time.
    """
    device = step.last_device
    spans = [(own.start, own.end) for own in step.on(device)]
    spans += [(w.start, w.end) for w in waits(step, device) if w.why]
    return length(clipped(spans, (step.begin, step.end))) / step.seconds


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

    def of(self, start: float, end: float) -> list[tuple[float, float, str]]:
        """The waits that a gap consists of."""
        step = self._step
        if end <= step.start:
            return [(start, end, self._between(start, end))]
        if start >= self._last:
            return [(start, end, self._after_all(start))]
        index = bisect_right(self._times, end + 1e-6) - 1
        arrival = self._arrivals[index] if index >= 0 else None  # the last in the gap
        if arrival is None or arrival.time <= start + _SHORT:
            return [(start, end, self._without_arrival(start, end))]
        came = (start, min(arrival.time, end), self._waited_for(arrival, start))
        if end - arrival.time <= _SHORT:
            return [(start, end, came[2])]
        return [came, (arrival.time, end, CORES)]

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

    def _waited_for(self, arrival: Arrival, start: float) -> str:
        if not arrival.source:
            return ""
        name = producer_of(arrival.name)
        tower = tower_of(name)
        whose = "" if tower is None else f"tower {tower}'s "
        part = cargo_of(name)
        if part in ("other", "forward"):  # the work there that made the tensor
            busy = self._busiest_part(arrival.source, start, arrival.time)
            part, whose = (busy, "") if busy == "input" else (part, whose)
            if "PartitionedCall" in name.rpartition("/")[2]:  # all of a tower's results
                part = busy or part
        return f"{whose}{part} from {short_device(arrival.source)}"

    def _busiest_part(self, device: str, start: float, end: float) -> str:
        """The part that a device did for most of a span; ``""`` for none."""
        spans: dict[str, list[Span]] = {}
        for own in self._step.on(device):
            inside = clipped([(own.start, own.end)], (start, end))
            spans.setdefault(own.part, []).extend(inside)
        most = max(spans, key=lambda part: length(spans[part]), default="")
        return most if most and length(spans[most]) > 0.5 * (end - start) else ""

    def _after_all(self, start: float) -> str:
        step, device = self._step, self._device
        if step.last_device in ("", device):
            return RETURN
        last = max(step.on(step.last_device), key=lambda interval: interval.end)
        if start >= last.end:
            return RETURN
        tower = "" if last.tower is None else f"tower {last.tower}'s "
        return f"{tower}{last.part} on {short_device(last.device)} to end the step"


def short_device(device: str) -> str:
    """A device string without the prefix that all devices of a local run share."""
    return device.removeprefix("/job:localhost/replica:0/task:0")
