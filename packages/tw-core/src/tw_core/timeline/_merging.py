"""Joining the trace files of several processes, with their clocks aligned."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tw_core.checks import check_list, public
from tw_core.timeline._clocks import Before, align_clocks
from tw_core.timeline._trace import write_trace

_MICRO = 1e-6
_PIDS = 1000  # processes of a trace file, at most


@public
def merge_traces(paths: Sequence[str | Path], path: str | Path) -> dict[str, float]:
    """Joins the trace files of processes that took steps together.

    No process leaves an all-reduce before all have joined: this bounds the difference
    of two clocks from both sides, and the middle is taken. Processes without a
    collective in common keep the time of their system's clock.

    Args:
      paths: files of ``StepRecorder.write``, at least one, each with a ``task`` of its
        own; the clock of the first is the reference.
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
                f"merge_traces: two files are of task {task!r}, one of them {each}. "
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
    about = {"task": "", "epoch": zero, "shifts": shifts}
    merged = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    write_trace(merged, path)
    return shifts


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
