"""Reading a session's recording: ``RunMetadata.step_stats``."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tw_core.devices import canonical_device
from tw_doctor._timeline.clocks import Before, align_clocks
from tw_doctor._timeline.intervals import Arrival, RecordedStep
from tw_doctor._timeline.parts import interval_of, producer_of

_LABEL = re.compile(r"(?:\[.*\] )?\S+ = (\w+)\((.*)\)$")
_RECEIVED = re.compile(r"(?:edge_\d+_)?(\S+) from (\S+) to (\S+)$")
_IGNORED = {"_SOURCE", "_SINK"}
_STREAM = re.compile(r"(/stream:.*|/memcpy| \((compute|memcpy)\))$")


class _Node(NamedTuple):
    """An operation that a task recorded, in seconds of that task's clock."""

    device: str
    task: str
    name: str
    kind: str
    inputs: tuple[str, ...]
    start: float
    end: float
    num_bytes: int | None
    received: tuple[str, str] | None  # (producer, source device) of a RecvTensor
    of_stream: bool  # run by a GPU, and not by an executor


def step_of_stats(
    step_stats: Any,
    number: int,
    *,
    begin: float,
    start: float,
    end: float,
    epoch: float,
) -> RecordedStep:
    """Makes a step from one ``Session.run`` recorded with a full trace.

    The clocks of other tasks are aligned with the program's: their tensors arrive after
    they were sent, and all of their work is between the session's call and return. The
    system's clock is the program's + ``epoch``; all are in seconds.
    """
    nodes = [
        node
        for device_stats in step_stats.dev_stats
        for node in _nodes(device_stats, epoch)
    ]
    shift = _shifts(nodes, start, end)
    nodes = [
        node._replace(
            start=node.start + shift[node.task],
            end=node.end + shift[node.task],
        )
        for node in nodes
    ]
    # Streams belong to whole GPUs; the launch of an operation names the logical one.
    launched = {
        node.name: node.device
        for node in nodes
        if not node.of_stream and "GPU" in node.device
    }
    nodes = [
        node._replace(device=launched.get(node.name, node.device))
        if node.of_stream
        else node
        for node in nodes
    ]
    streams = {node.device for node in nodes if node.of_stream}
    made = [node for node in nodes if node.received is None]
    # A GPU's work is that of its streams; the rest are launches.
    made = [n for n in made if n.device not in streams or n.of_stream]
    return RecordedStep(
        number,
        begin,
        start,
        end,
        tuple(
            interval_of(n.device, n.name, n.kind, n.start, n.end, n.num_bytes)
            for n in sorted(made, key=lambda own: own.start)
        ),
        tuple(sorted(_arrivals(nodes, made), key=lambda own: own.time)),
    )


def _nodes(device_stats: Any, epoch: float) -> Iterator[_Node]:
    is_stream = _STREAM.search(device_stats.device)
    if is_stream and not device_stats.device.endswith(("/stream:all", "/memcpy")):
        return  # a single stream
    device = canonical_device(_STREAM.sub("", device_stats.device))
    task = device.rpartition("/device:")[0]
    for stats in device_stats.node_stats:
        if stats.node_name in _IGNORED:
            continue
        base = stats.all_start_micros * 1e-6 - epoch
        label = _LABEL.match(stats.timeline_label)
        received = None
        name, kind, inputs = stats.node_name, "", ()
        if is_stream:
            name, _, kind = name.partition(":")
        if stats.node_name == "RecvTensor":
            found = _RECEIVED.search(stats.timeline_label)
            if found is None:
                continue
            kind, received = "RecvTensor", (found[1], canonical_device(found[2]))
            name = found[1]
        elif label is not None and not is_stream:
            kind = label[1]
            inputs = tuple(filter(None, label[2].split(", ")))
        yield _Node(
            *(device, task, name, kind, inputs),
            start=base + stats.op_start_rel_micros * 1e-6,
            end=base + max(stats.op_end_rel_micros, stats.all_end_rel_micros) * 1e-6,
            num_bytes=_bytes_of(stats),
            received=received,
            of_stream=bool(is_stream),
        )


def _bytes_of(stats: Any) -> int:
    outputs = (out.tensor_description.allocation_description for out in stats.output)
    return sum(own.requested_bytes for own in outputs)


def _arrivals(nodes: Iterable[_Node], made: Iterable[_Node]) -> Iterator[Arrival]:
    """Yields tensors received over a network, and those taken from other devices."""
    producers: dict[str, _Node] = {}
    for node in made:
        producers.setdefault(node.name, node)
    over_network = set()
    for node in nodes:
        if node.received is not None:
            name, source = node.received
            made_by = producers.get(name)
            sent = node.start if made_by is None else max(made_by.end, node.start)
            over_network.add((node.device, name))
            yield Arrival(
                *(node.device, source, name, min(sent, node.end), node.end),
                node.num_bytes,
            )
    taken = set()
    for node in made:
        for taken_name in node.inputs:
            name = producer_of(taken_name)
            made_by = producers.get(name)
            key = (node.device, name)
            if made_by is None or made_by.device == node.device or key in taken:
                continue
            taken.add(key)
            if key in over_network:
                continue
            # Devices of one process read each other's memory without a copy; of an
            # unrecorded transfer only the time of its use is known.
            is_near = node.task == made_by.task
            came = made_by.end if is_near else max(made_by.end, node.start)
            yield Arrival(
                *(node.device, made_by.device, name, made_by.end, came),
                made_by.num_bytes,
            )


def _shifts(nodes: list[_Node], start: float, end: float) -> dict[str, float]:
    """Returns the seconds to add to each task's times, so that all orders hold."""
    tasks = sorted({node.task for node in nodes})
    if len(tasks) < 2:
        return dict.fromkeys(tasks, 0.0)
    producers = {n.name: n for n in nodes if n.received is None}
    befores = []
    for node in nodes:
        made_by = producers.get(node.received[0]) if node.received else None
        if made_by is not None:
            befores.append(Before(made_by.task, made_by.end, node.task, node.end))
    # All of a session's work is between its call and its return.
    caller = "the session's"
    for node in nodes:
        befores.append(Before(caller, start, node.task, node.start))
        befores.append(Before(node.task, node.end, caller, end))
    return align_clocks(befores, tasks, caller)
