"""Reading an ``XSpace``: the events that TensorFlow's profiler recorded.

On CPU devices executors record the name and type of each operation, but not the device:
one executor serves one device, which its sends name, or else the function or graph
requests. Operations that took next to no time before, including sends, are not recorded
at all.
"""

import functools
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tw_core.devices import canonical_device
from tw_doctor._tf_compat import function_devices
from tw_doctor._timeline.intervals import Arrival, Call, Interval, RecordedStep
from tw_doctor._timeline.parts import interval_of, producer_of

MARK = "tw_doctor.step"

_OP = re.compile(r"([^\s:]+):(\w+)$")
_KEY = re.compile(r"(/job:[^;]+);\w+;(/job:[^;]+);(?:edge_\d+_)?([^;]+);")
_REGION = "ExecutorState::Process"
_BEGIN, _END = "ExecutorState::ProcessAsync::Start", "ExecutorState::ProcessAsync::Done"
_LAST_NUMBER = re.compile(r"_(\d+)$")
_GPU = re.compile(r"/device:(GPU:\d+)")
_EAGER = "EagerLocalExecute: "
_RECEIVES = {"_Recv", "_HostRecv"}
_MOVES = {*_RECEIVES, "_Send", "_HostSend"}


class _Event(NamedTuple):
    """An event of a thread or stream, in seconds."""

    name: str
    start: float
    end: float
    stats: dict[str, Any]


class _Ran(NamedTuple):
    """An operation, with the executor that ran it."""

    executor: tuple[object, ...]
    name: str
    kind: str
    start: float
    end: float
    num_bytes: int | None


class _Caller(NamedTuple):
    """The operation by which an executor's function was called, in another executor."""

    executor: tuple[object, ...]
    name: str


class _Sent(NamedTuple):
    """A tensor that an executor handed over."""

    executor: tuple[object, ...]
    name: str  # of the send
    producer: str
    source: str
    target: str
    time: float


class _Found(NamedTuple):
    """The work of executors."""

    ran: list[_Ran]
    sent: list[_Sent]
    callers: dict[tuple[object, ...], _Caller]
    launchers: dict[Any, tuple[object, ...]]  # by the number of what ran on a GPU


def steps_of_space(
    space: Any, *, last: int, graph: tf.Graph | None = None
) -> list[RecordedStep]:
    """Makes the ``last`` steps from a profile, with the ``graph`` of a session called.

    Steps are marked by the program; without marks, they are the outermost calls of a
    ``tf.function`` or session, on the thread that spent most time in them.
    """
    lines = [
        list(_events(plane, line))
        for plane in space.planes
        if plane.name.startswith("/host:")
        for line in plane.lines
    ]
    marks, calls = _calls(lines)
    if not marks:
        return []
    found = _operations(lines)
    devices = _Devices(lines, graph, found)
    intervals = [
        interval_of(devices.of(own.executor), *own[1:])
        for own in found.ran
        if own.kind not in _RECEIVES
    ]
    kernels = list(_kernels(space, found, devices))
    on_gpus = {own.device for own in kernels}  # there the executors only launch
    intervals = [own for own in intervals if own.device not in on_gpus] + kernels
    arrivals = list(_arrivals(found, devices))
    steps = []
    for index in range(max(0, len(marks) - last), len(marks)):
        mark = marks[index]
        begin = marks[index - 1].end if index else mark.start
        steps.append(
            RecordedStep(
                int(mark.stats.get("step_num", index)),
                *(begin, mark.start, mark.end),
                _within(intervals, begin, mark.end, by="start"),
                _within(arrivals, begin, mark.end, by="time"),
                _within(calls, begin, mark.end, by="start"),
            )
        )
    return steps


def _within(things: Iterable[Any], begin: float, end: float, *, by: str) -> Any:
    inside = [own for own in things if begin <= getattr(own, by) < end]
    return tuple(sorted(inside, key=lambda own: float(getattr(own, by))))


def _events(plane: Any, line: Any) -> Iterator[_Event]:
    base = line.timestamp_ns * 1e-9
    names = plane.event_metadata
    for event in line.events:
        start = base + event.offset_ps * 1e-12
        stats = {plane.stat_metadata[s.metadata_id].name: s for s in event.stats}
        yield _Event(
            names[event.metadata_id].name,
            start,
            start + event.duration_ps * 1e-12,
            {name: _value(plane, stat) for name, stat in stats.items()},
        )


def _value(plane: Any, stat: Any) -> Any:
    kind = stat.WhichOneof("value")
    if kind == "ref_value":
        return plane.stat_metadata[stat.ref_value].name
    return getattr(stat, kind) if kind else None


def _calls(lines: Sequence[list[_Event]]) -> tuple[list[_Event], list[Call]]:
    """Returns the steps, and the calls of the thread that they are on."""
    best: tuple[tuple[bool, float], list[_Event], list[_Event]] = ((False, 0.0), [], [])
    for line in lines:
        marks = [event for event in line if event.name == MARK]
        steps = marks or [
            event
            for event in line
            if "tf_function_call" in event.stats or event.name == "SessionRun"
        ]
        outer = _outermost(steps)
        rank = (bool(marks), sum(event.end - event.start for event in outer))
        if outer and rank > best[0]:
            best = (rank, outer, line)
    _, steps, line = best
    calls = [
        Call(event.name.removeprefix(_EAGER), event.start, event.end)
        for event in line
        if event.name.startswith(_EAGER) or event.name == "SessionRun"
    ]
    return steps, calls


def _outermost(events: Iterable[_Event]) -> list[_Event]:
    outer: list[_Event] = []
    for event in sorted(events, key=lambda own: (own.start, -own.end)):
        if not outer or event.start >= outer[-1].end:
            outer.append(event)
    return outer


def _operations(lines: Iterable[list[_Event]]) -> _Found:
    """Returns ops that executors ran, sent or launched, and callers of functions.

    A receive lasts until it has its tensor.
    """
    ran: list[_Ran] = []
    callers: dict[tuple[object, ...], _Caller] = {}
    sent: list[_Sent] = []
    launchers: dict[Any, tuple[object, ...]] = {}
    begun: dict[Any, _Ran] = {}
    ended: dict[Any, float] = {}
    for line in lines:
        regions = sorted(
            (event for event in line if event.name == _REGION),
            key=lambda own: own.start,
        )
        starts = [region.start for region in regions]
        memory = _Memory(line)
        calls = sorted(
            (event for event in line if event.name == _BEGIN), key=lambda e: e.start
        )
        begins = [event.start for event in calls]
        for event in line:
            if event.name == _END:
                ended[event.stats.get("_c")] = event.end
                continue
            index = bisect_right(starts, event.start) - 1
            if index < 0 or event.start > regions[index].end:
                continue
            executor = _executor(regions[index])
            if "correlation_id" in event.stats:
                launchers[event.stats["correlation_id"]] = executor
                continue
            if event.name == "FunctionRun":
                call = bisect_right(begins, event.start) - 1
                if call >= 0 and event.end <= calls[call].end:
                    inner = ("function", event.stats.get("_p"))
                    callers[inner] = _Caller(executor, calls[call].stats["name"])
                continue
            if event.name == _BEGIN:
                name, kind = event.stats.get("name", ""), event.stats["kernel_type"]
                own = _Ran(executor, name, kind, event.start, event.end, None)
                begun[event.stats.get("_p")] = own
                continue
            found = _OP.match(event.name)
            if found is None:
                continue
            name, kind = found[1], found[2]
            size = memory.taken_in(event.start, event.end)
            ran.append(_Ran(executor, name, kind, event.start, event.end, size))
            key = _KEY.match(str(event.stats.get("key", "")))
            if key:
                source, target = map(canonical_device, key.groups()[:2])
                sent.append(_Sent(executor, name, key[3], source, target, event.start))
    ran += [own._replace(end=ended[key]) for key, own in begun.items() if key in ended]
    # The time of a call is that of its function's operations, if these are recorded.
    inside = {own.executor for own in ran}
    called = {own for executor, own in callers.items() if executor in inside}
    named = _linked([own._replace(name=_name_in_caller(own, callers)) for own in ran])
    kept = [
        own
        for own, raw in zip(named, ran, strict=True)
        if _Caller(raw.executor, raw.name) not in called
    ]
    return _Found(kept, sent, callers, launchers)


def _name_in_caller(own: _Ran, callers: dict[tuple[object, ...], _Caller]) -> str:
    """Returns the name that an op has where the call of its function is inlined."""
    name, caller = own.name, callers.get(own.executor)
    while caller is not None and own.kind not in _MOVES:
        name, caller = f"{caller.name}/{name}", callers.get(caller.executor)
    return name


class _Memory:
    """The memory that a thread allocated, and when."""

    def __init__(self, line: Iterable[_Event]) -> None:
        taken = sorted(
            (event.start, int(event.stats.get("requested_bytes") or 0))
            for event in line
            if event.name == "MemoryAllocation"
        )
        self._times = [time for time, _ in taken]
        self._sizes = [size for _, size in taken]

    def taken_in(self, start: float, end: float) -> int | None:
        """Bytes; None if nothing was allocated, as by an op that forwards its input."""
        first, last = bisect_left(self._times, start), bisect_right(self._times, end)
        return sum(self._sizes[first:last]) or None


def _executor(region: _Event) -> tuple[object, ...]:
    """A function's executors have a number each; those of a session share one."""
    run, context = region.stats.get("id"), region.stats.get("_c")
    if context is None or context == run:
        return ("session", region.start)
    return ("function", context)


def _linked(ran: list[_Ran]) -> list[_Ran]:
    """Joins the stretches of a session's executors that ran ops of one name.

    In a session's graph an op's name determines its device, whichever stretch ran it.
    """
    parents: dict[tuple[object, ...], tuple[object, ...]] = {}

    def root(key: tuple[object, ...]) -> tuple[object, ...]:
        while parents.get(key, key) != key:
            key = parents[key]
        return key

    for own in ran:
        if own.executor[0] == "session":
            name = ("session", "op", own.name)
            parents[root(own.executor)] = root(name)
    return [own._replace(executor=root(own.executor)) for own in ran]


class _Devices:
    """The device that each executor serves, and that each operation was on.

    Known from an executor's sends and receives; where these are not recorded, from the
    devices that its function, or the session's graph, asks for.
    """

    def __init__(
        self, lines: Iterable[list[_Event]], graph: tf.Graph | None, found: _Found
    ) -> None:
        ran, sent, self._callers, _ = found
        self._functions = dict(_called_functions(lines))
        self._asked_by = functools.cache(function_devices)
        ops = graph.get_operations() if graph is not None else []
        self._graph = {op.name: op.device for op in ops if op.device}
        self._found: dict[tuple[object, ...], str] = {}
        sources = {own.name: own.source for own in sent}
        targets = {_received_as(own.name): own.target for own in sent}
        for own in ran:
            if own.kind in ("_Send", "_HostSend") and own.name in sources:
                self._found[own.executor] = sources[own.name]
            elif own.kind in _RECEIVES and own.name in targets:
                self._found.setdefault(own.executor, targets[own.name])
        made = [own for own in ran if own.kind not in _RECEIVES]
        for own in made:
            device = self.on(own.executor, own.name)
            if device:
                self._found[own.executor] = device
        self._of_op = {own.name: self.of(own.executor) for own in made}

    def of(self, executor: tuple[object, ...]) -> str:
        """Canonical device string; ``""`` if it is unknown."""
        return self._found.get(executor, "")

    def on(self, executor: tuple[object, ...], op: str) -> str:
        """Device of an executor's op; ``""`` if it is unknown."""
        return self.of(executor) or self._asked(executor, op)

    def source_of(self, receive: _Ran) -> str:
        """Device of the op that made a received tensor; ``""`` if it is unknown."""
        name = producer_of(receive.name)
        return self._of_op.get(name) or self._asked(receive.executor, name)

    def _asked(self, executor: tuple[object, ...], op: str) -> str:
        """Device that an executor's function, or the graph, asks for."""
        asked, caller = self._graph, self._callers.get(executor)
        if caller is not None:
            return self.of(executor) or self.on(*caller)
        if executor[0] == "function":
            name = self._functions.get(executor[-1])
            asked = {} if name is None else self._asked_by(name)
        device = asked.get(op, "")
        return canonical_device(device) if device else ""


def _called_functions(lines: Iterable[list[_Event]]) -> Iterator[tuple[object, str]]:
    """Yields each function executor's number with the function's name."""
    for line in lines:
        called = [event for event in line if event.name.startswith(_EAGER)]
        starts = [event.start for event in called]
        for event in line:
            if event.name != "FunctionRun":
                continue
            index = bisect_right(starts, event.start) - 1
            if index >= 0 and event.start < called[index].end:
                yield event.stats.get("_p"), called[index].name.removeprefix(_EAGER)


def _received_as(name: str) -> str:
    """Returns the name of a send's receive, which has the next number."""
    return _LAST_NUMBER.sub(lambda found: f"_{int(found[1]) + 1}", name)


def _arrivals(found: _Found, devices: _Devices) -> Iterator[Arrival]:
    """Pairs each receive with the last send before its end."""
    sends: dict[tuple[str, str], list[_Sent]] = defaultdict(list)
    for one in sorted(found.sent, key=lambda own: own.time):
        sends[_received_as(one.name), one.target].append(one)
    made = defaultdict(list)
    for own in found.ran:
        if own.num_bytes:
            made[own.name].append(own.num_bytes)
    for own in found.ran:
        if own.kind not in _RECEIVES:
            continue
        device = devices.of(own.executor)
        known = sends.get((own.name, device), [])
        index = bisect_right([one.time for one in known], own.end) - 1
        match = known[index] if index >= 0 else None
        name = producer_of(own.name) if match is None else match.producer
        yield Arrival(
            device,
            devices.source_of(own) if match is None else match.source,
            name,
            own.end if match is None else match.time,
            own.end,
            made[name][-1] if made[name] else None,
        )


def _kernels(space: Any, done: _Found, devices: _Devices) -> Iterator[Interval]:
    """Yields the work of GPUs' streams, by the operation that launched it.

    The profile has whole GPUs; a logical one is that of the executor that launched.
    """
    for plane in space.planes:
        found = _GPU.search(plane.name)
        if not found:
            continue
        whole = canonical_device(found[0])
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue  # the other lines are derived from the streams
            for event in _events(plane, line):
                of_op = str(event.stats.get("tf_op") or event.name)
                name, _, kind = of_op.partition(":")
                kind = event.name if event.name.startswith("Memcpy") else kind
                executor = done.launchers.get(event.stats.get("correlation_id"), ())
                at = devices.on(executor, name) if executor else ""
                ran = _Ran(executor, name, kind, event.start, event.end, None)
                name = _name_in_caller(ran, done.callers)
                yield interval_of(at if "GPU" in at else whole, name, *ran[2:])
