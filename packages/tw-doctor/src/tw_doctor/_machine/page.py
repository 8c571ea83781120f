"""The report of ``tw-doctor`` as text, and its progress bar."""

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tw_reduce.internal import COPIED, KEPT, Strategy

_BAR = 24
_BUSY = ": times will mislead; measure on an idle machine"
_MARKS = {"ok": "ok   ", "unfit": "-    ", "wrong": "WRONG"}
_SHOWN = 4  # strategies per list


class Page:
    """Writes results to stdout as they arrive, and the bar to a terminal's stderr."""

    def __init__(self) -> None:
        self._shows_bar = sys.stderr.isatty()

    def progress(self, share: float, what: str) -> None:
        """Shows the share of work done and the current step; on a terminal only."""
        if not self._shows_bar:
            return
        full = round(_BAR * share)
        bar = f"[{'=' * full}{' ' * (_BAR - full)}] {share:4.0%}  {what}"
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\033[K{bar[:width]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Removes the bar."""
        if self._shows_bar:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def write(self, lines: Iterable[str]) -> None:
        """Writes lines to stdout."""
        self.clear()
        print("\n".join(lines), flush=True)


def facts_lines(report: Mapping[str, Any]) -> list[str]:
    """Formats versions, devices, memory, links, TF_CONFIG and exposure."""
    facts, made_on = report["facts"], report["made_on"]
    own = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    memory = [f"{facts['memory_bytes'] / 2**30:.1f} GiB"]
    memory += [
        f"{gpu['name']} {gpu['total_mib']:,} MiB, {gpu['free_mib']:,} free"
        for gpu in facts["gpu_memory"]
    ]
    lines = [
        f"versions   {own}",
        f"machine    {facts['system']}, {facts['cores']} cores, {made_on['processor']}",
        f"load       {facts['load']}{_BUSY if facts['load'] > 1 else ''}",
        f"memory     {'; '.join(memory)}",
        f"gpus       {made_on['gpus']}{facts['no_gpu'] and '. ' + facts['no_gpu']}",
        f"towers     {', '.join(report['devices'])}",
        f"TF_CONFIG  {facts['tf_config']}",
        f"processes  {facts['engine']}",
        f"exposed    {facts['exposed']}",
    ]
    links = facts["links"] or ["nvidia-smi shows none"]
    heads = ["links", *[""] * len(links)]
    return [*lines, *map("{:10} {}".format, heads, links)]


def check_line(check: Mapping[str, Any]) -> str:
    """Formats the result of a check."""
    said = f"  {check['said']}" if check["said"] else ""
    return f"  {_MARKS[check['status']]} {check['name']}{said}"


def copy_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Formats the speed of copies between devices."""
    yield "copies         latency, and rate of 64 MiB"
    for row in rows:
        latency, rate = row["latency_us"], row["gb_per_s"]
        shown = "one memory" if rate is None else f"{rate:.1f} GB/s"
        told = "no time left" if latency is None else f"{latency:8.1f} us  {shown}"
        yield f"  {_short(row['from'])} -> {_short(row['to'])}  {told}"


def reducer_lines(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Formats the fastest strategies on each list of gradients."""
    yield "reducers       time, and ratio to the fastest"
    said = {KEPT: "sums left where they are", COPIED: "copied to every tower"}
    for entry in entries:
        for where, rows in entry["times"].items():
            yield f"  {entry['name']}, {said[where]}"
            ordered = sorted(rows, key=lambda row: row["ratio"])
            fastest = ordered[0]["ratio"]
            for row in _distinct(ordered)[:_SHOWN]:
                name = Strategy(row["small"], row["large"], row["below_bytes"])
                time = f"{1e3 * row['seconds']:9.3f} ms"
                yield f"    {time}  {row['ratio'] / fastest:6.2f}  {name}"


def scaling_lines(scaling: Mapping[str, Any]) -> Iterator[str]:
    """Formats how training scales with the number of towers."""
    yield "scaling        images/s; of single towers' sum; of towers that do not reduce"
    for row in scaling["rows"]:
        shares = f"{row['efficiency']:7.1%} {row['of_bound']:7.1%}"
        yield f"  {row['towers']:3} towers  {row['images_per_s']:12,.1f}  {shares}"


# The measurements, in this order.
PARTS: dict[str, Callable[[Any], Iterator[str]]] = {
    "copies": copy_lines,
    "reducers": reducer_lines,
    "scaling": scaling_lines,
}


def _distinct(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leaves out strategies that did the same as an earlier one and share its time."""
    shown = {row["seconds"]: row for row in reversed(rows)}
    return [row for row in rows if shown[row["seconds"]] is row]


def _short(device: str) -> str:
    return device.removeprefix("/device:").removeprefix("/").lower()
