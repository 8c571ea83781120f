"""Recorded steps as a trace file, for Perfetto and chrome://tracing.

The format is the Trace Event Format: a JSON object whose ``traceEvents`` have times in
microseconds; each device is a process, with overlapping operations on separate threads.
Files of several processes are joined with their clocks aligned.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tw_core.internal import check_list
from tw_doctor._timeline.clocks import Before, align_clocks
from tw_doctor._timeline.intervals import Interval, RecordedStep
from tw_doctor._timeline.waits import waits

_PROGRAM = 1  # the process of steps and calls; devices follow
_WAITS = 1  # the first thread of a device; operations follow
_PIDS = 1000  # processes of a trace file, at most
_MICRO = 1e-6


def trace_of(
    steps: Sequence[RecordedStep], *, task: str = "", epoch: float = 0.0
) -> dict[str, Any]:
    """Returns a trace file's contents; a time + ``epoch`` is the system's clock."""
    found = {device for step in steps for device in step.devices}
    devices = sorted(found, key=lambda device: (len(device), device))
    pids = {device: number for number, device in enumerate(devices, start=2)}
    events = [_named("process_name", _PROGRAM, 0, f"{task} program".strip())]
    for device, pid in pids.items():
        name = f"{task} {device}".strip()
        events += [
            _named("process_name", pid, 0, name),
            _named("thread_name", pid, _WAITS, "waits"),
        ]
    for step in steps:
        events += _events(step, pids)
    return _file_of(events, task=task, epoch=epoch)


def write_trace(trace: dict[str, Any], path: str | Path) -> None:
    """Writes a trace file, whole or not at all."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(
            f"path must be that of a file; {path} is a folder. Name a file in it, e.g. "
            f"{path / 'trace.json'}."
        )
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_text(json.dumps(trace), encoding="utf-8")
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def merge_traces(paths: Sequence[str | Path], path: str | Path) -> dict[str, float]:
    """Joins the trace files of processes that took steps together.

    No process leaves an all-reduce before all have joined: this bounds the difference
    of two clocks from both sides, and the middle is taken. Processes without a
    collective in common keep the time of their system's clock.

    Args:
      paths: files of ``StepRecorder.write``, at least one, each with its own ``task``;
        the clock of the first is the reference.
      path: where to write the trace of all.

    Returns:
      {task: seconds that were added to its clock}.

    Raises:
      TypeError: ``paths`` is not a list.
      ValueError: no path, a file that ``write`` did not write, or two files of one
        task.
      OSError: a file cannot be read or written.
    """
    check_list(paths=paths, of="paths")
    traces = {}
    for each in map(Path, paths):
        trace = _read(each)
        task = trace["otherData"]["task"]
        if task in traces:
            raise ValueError(
                f"merge_traces: two files have task {task!r}, one of them {each}. "
                "Give each process a name: steps.write(path, task=...)."
            )
        traces[task] = trace
    meetings = {task: _meetings(trace) for task, trace in traces.items()}
    reference = next(iter(traces))
    befores = [
        Before(one, span[0], other, meetings[other][meeting][1])
        for one, own in meetings.items()
        for other in meetings
        if one != other
        for meeting, span in own.items()
        if meeting in meetings[other]
    ]
    shifts = align_clocks(befores, traces, reference)
    zero = traces[reference]["otherData"]["epoch"]
    events = []
    for number, (task, trace) in enumerate(traces.items()):
        moved = (trace["otherData"]["epoch"] - zero + shifts[task]) / _MICRO
        for event in trace["traceEvents"]:
            own = event | {"pid": event["pid"] + _PIDS * number}
            if "ts" in event:
                own["ts"] = event["ts"] + moved
            if "id" in event:
                own["id"] = f"{number}.{event['id']}"
            events.append(own)
    write_trace(_file_of(events, task="", epoch=zero, shifts=shifts), path)
    return shifts


def lanes(intervals: Sequence[Interval]) -> list[list[Interval]]:
    """Spreads intervals (sorted by start) over as few lanes as avoid overlap."""
    found: list[list[Interval]] = []
    for interval in intervals:
        for lane in found:
            if lane[-1].end <= interval.start:
                lane.append(interval)
                break
        else:
            found.append([interval])
    return found


def _events(step: RecordedStep, pids: dict[str, int]) -> Iterator[dict[str, Any]]:
    number = step.number
    yield _span(_PROGRAM, 1, f"step {number}", "step", step.start, step.end)
    if step.begin < step.start:
        name = "between steps"
        yield _span(_PROGRAM, 1, name, "program", step.begin, step.start)
    for call in step.calls:
        yield _span(_PROGRAM, 2, call.name, "program", call.start, call.end)
    for device in step.devices:
        pid = pids[device]
        for wait in waits(step, device):
            name = f"waits for {wait.why or '?'}"
            yield _span(pid, _WAITS, name, "wait", wait.start, wait.end)
        for tid, lane in enumerate(lanes(step.on(device)), start=_WAITS + 1):
            for own in lane:
                facts: dict[str, Any] = {
                    "kind": own.kind,
                    "tower": own.tower,
                    "step": number,
                }
                if own.num_bytes is not None:
                    facts["bytes"] = own.num_bytes
                where = (pid, tid, own.name, own.part, own.start, own.end)
                yield _span(*where, facts)
    for index, arrival in enumerate(step.arrivals):
        if arrival.source not in pids or arrival.device not in pids:
            continue
        base = {"cat": "move", "name": arrival.name, "id": f"{number}.{index}"}
        sent, came = (round(1e6 * t, 3) for t in (arrival.sent, arrival.time))
        source, target = pids[arrival.source], pids[arrival.device]
        yield base | {"ph": "s", "pid": source, "tid": _WAITS + 1, "ts": sent}
        yield base | {
            **{"ph": "f", "bp": "e", "pid": target, "tid": _WAITS + 1},
            "ts": max(sent, came),
        }


def _span(
    pid: int,
    tid: int,
    name: str,
    part: str,
    start: float,
    end: float,
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    return {
        **{"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": part},
        **{"ts": round(1e6 * start, 3), "dur": round(1e6 * (end - start), 3)},
        "args": dict(facts),
    }


def _file_of(events: list[dict[str, Any]], **about: Any) -> dict[str, Any]:
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _read(path: Path) -> dict[str, Any]:
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
        about, events = trace["otherData"], trace["traceEvents"]
        is_ours = {"task", "epoch"} <= about.keys() and bool(events)
    except (AttributeError, KeyError, TypeError, ValueError):
        is_ours = False
    if not is_ours:
        raise ValueError(
            f"merge_traces: {path} is not a trace that StepRecorder.write wrote."
        )
    return dict(trace)


def _meetings(trace: dict[str, Any]) -> dict[tuple[Any, ...], tuple[float, float]]:
    """Returns when each collective began and ended, in the system clock's seconds."""
    epoch = trace["otherData"]["epoch"]
    found: dict[tuple[Any, ...], tuple[float, float]] = {}
    seen: Counter[tuple[Any, ...]] = Counter()
    for event in trace["traceEvents"]:
        facts = event.get("args", {})
        if event.get("ph") != "X" or "Collective" not in str(facts.get("kind")):
            continue
        key = (facts["step"], event["name"])
        start = epoch + _MICRO * event["ts"]
        found[*key, seen[key]] = (start, start + _MICRO * event["dur"])
        seen[key] += 1
    return found
