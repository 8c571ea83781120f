"""Recorded steps as a trace file, for Perfetto and chrome://tracing.

The format is the Trace Event Format: a JSON object whose ``traceEvents`` have times in
microseconds; each device is a process, with overlapping operations on separate threads.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tw_core.checks import caller
from tw_core.timeline._intervals import Interval, RecordedStep
from tw_core.timeline._waits import waits

_PROGRAM = 1  # the process of steps and calls; devices follow
_WAITS = 1  # the first thread of a device; operations follow


def trace_of(
    steps: Sequence[RecordedStep], *, task: str = "", epoch: float = 0.0
) -> dict[str, Any]:
    """Returns a trace file's contents; a time + ``epoch`` is the system's clock."""
    devices = sorted({device for step in steps for device in step.devices})
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
    about = {"task": task, "epoch": epoch}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def write_trace(trace: dict[str, Any], path: str | Path) -> None:
    """Writes a trace file, whole or not at all."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(
            f"{caller()}: path must be a file's; {path} is a folder. Name a file in "
            f"it, such as {path / 'trace.json'}."
        )
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_text(json.dumps(trace), encoding="utf-8")
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


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


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
