"""The side channel of rank 0, with the other ends of up to a thousand ranks.

Rank 0's thread runs in this process, which does nothing else, so that the process's
time is the thread's, except that its main thread computes in Python for a while. A
second process has all other ends: sockets that greet, send heartbeats, describe an
exchange and answer, without TensorFlow. At last one of them closes its connection, or
falls silent.
"""

import base64
import json
import multiprocessing
import os
import selectors
import socket
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from racing import save

from tw_ranks._agreement import Exchange, TensorSpec
from tw_ranks._side_channel._attendance import Deadlines, Report
from tw_ranks._side_channel._coordinator import Coordinator
from tw_ranks._side_channel._introduction import Introduction, find_interval_s

OPTIONS = {"ranks": [64, 256, 1000], "tensors": 400}
LIMITS = Deadlines(timeout_s=10.0, first_timeout_s=600.0)
TRAIN_S, MIB = 5.0, 1 << 20
BOUNDS = {
    # Of a processor, and seconds: the latest answer to a heartbeat, a loss reported
    # after its connection has closed, or after its deadline.
    256: {"cpu": 0.08},
    1000: {
        "join_s": 5.0,
        "cpu": 0.25,
        "late_s": 1.0,
        "closed_s": 2.0,
        "silent_s": 2.0,
        "mib": 100.0,
    },
}


class Ends:
    """The other ends of all ranks, which share one thread."""

    def __init__(self, address: tuple[str, int], size: int, tensors: int) -> None:
        self.size, self.number = size, 0
        listed = [f"block_{n}/dense/kernel" for n in range(tensors)]
        specs = tuple(TensorSpec(name, "float32", (8, 8)) for name in listed)
        self.exchange = Exchange("a broadcast", specs)
        self.interval_s = find_interval_s(LIMITS.timeout_s, size)
        self.selector = selectors.DefaultSelector()
        self.lines: dict[int, socket.socket] = {}
        self.parts: dict[int, bytes] = dict.fromkeys(range(size), b"")
        self.due_s: dict[int, float] = {}
        self.sent_s: dict[int, float] = {}  # Of a heartbeat without an answer.
        self.late_s: list[float] = []
        self.heard: dict[str, set[int]] = {}  # Ranks, by what they were sent.
        self.received = 0
        for rank in range(size):
            line = socket.create_connection(address, 60.0)
            line.sendall(write({"do": "hello", "hello": asdict(introduce(rank, size))}))
            line.setblocking(False)
            self.selector.register(line, selectors.EVENT_READ, rank)
            self.lines[rank] = line
        self.wait_for("welcome", size)
        now_s = time.monotonic()
        for rank in range(size):
            self.due_s[rank] = now_s + rank / size * self.interval_s

    def wait_for(self, what: str, count: int) -> float:
        """Waits until so many ranks were sent it; returns how long that took."""
        self.heard[what] = set()
        began_s = time.monotonic()
        self.go_on(lambda: len(self.heard[what]) >= count)
        return time.monotonic() - began_s

    def go_on(self, is_over: Callable[[], bool], within_s: float = 120.0) -> None:
        """Sends heartbeats when they are due, and reads."""
        end_s = time.monotonic() + within_s
        while not is_over() and time.monotonic() < end_s:
            for key, _ in self.selector.select(0.005):
                self.read(key.data)
            now_s = time.monotonic()
            for rank in [rank for rank, due_s in self.due_s.items() if due_s <= now_s]:
                self.beat(rank, now_s)

    def beat(self, rank: int, now_s: float) -> None:
        """Reports progress, as in a training whose every heartbeat shows new steps."""
        self.number += 1
        step = self.number // self.size
        report = Report(step, step, 1, "the sum of gradients", made=self.number)
        self.due_s[rank] = now_s + self.interval_s
        self.sent_s.setdefault(rank, now_s)
        self.send(rank, {"do": "beat", "report": asdict(report)})

    def send(self, rank: int, message: dict[str, Any]) -> None:
        self.lines[rank].sendall(write(message))

    def read(self, rank: int) -> None:
        try:
            data = self.lines[rank].recv(1 << 20)
        except ConnectionResetError:
            data = b""
        self.received += len(data)
        if not data:
            self.drop(rank)
            return
        *lines, self.parts[rank] = (self.parts[rank] + data).split(b"\n")
        now_s = time.monotonic()
        for line in lines:
            do = read_kind(line)
            self.heard.setdefault(do, set()).add(rank)
            if do == "beat" and rank in self.sent_s:
                self.late_s.append(now_s - self.sent_s.pop(rank))
            if do == "report" and rank in self.due_s:
                self.due_s[rank] = now_s
            if do == "describe":
                described = asdict(self.exchange)
                self.send(
                    rank, {"do": "description", "number": 0, "exchange": described}
                )

    def agree(self) -> float:
        """Describes an exchange, as all ranks; returns how long that took."""
        digest = asdict(self.exchange.digest)
        for rank in range(self.size):
            self.send(rank, {"do": "agree", "number": 0, "digest": digest, "keys": 1})
        return self.wait_for("agreed", self.size)

    def drop(self, rank: int) -> None:
        self.selector.unregister(self.lines[rank])
        self.lines.pop(rank).close()
        self.due_s.pop(rank, None)


def introduce(rank: int, size: int) -> Introduction:
    node = f"node{rank // 8:04}.cluster.example"
    versions = {"Python": "3.11", "TensorFlow": "2.21.0", "the engine": "tensorflow"}
    task = f"{node}, process {7919 * rank % 4194304}"
    address = f"{node}:{32768 + 7919 * rank % 28000}"
    return Introduction(rank, size, address, task, f"{7919 * rank:016x}", versions)


def read_kind(line: bytes) -> str:
    """Returns what a message does, without reading the rest as a rank would."""
    kind = line[8 : line.index(b'"', 8)].decode()  # '{"do": "beat", ...'
    if kind != "packed":
        return kind
    packed = base64.b64decode(json.loads(line)["message"])
    return read_kind(zlib.decompressobj().decompress(packed, 64))


def write(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def act(pipe: Connection, address: tuple[str, int], size: int, tensors: int) -> None:
    """Runs the other ends part by part, and sends what each has measured."""
    began_s = time.monotonic()
    ends = Ends(address, size, tensors)
    pipe.send({"join_s": time.monotonic() - began_s, "join_bytes": ends.received})
    for part in iter(pipe.recv, ""):
        found = {}
        if part in ("train", "trace"):
            ends.go_on(lambda: False, within_s=TRAIN_S)
        if part == "agree":
            found["agree_s"] = ends.agree()
        if part == "close":
            ends.drop(size - 1)
            found["closed_s"] = ends.wait_for("missing", size - 1)
        if part == "fall silent":
            del ends.due_s[size - 1]
            took_s = ends.wait_for("missing", size - 1)
            found["silent_s"] = took_s - LIMITS.timeout_s
        pipe.send(found | {"late_s": max(ends.late_s, default=0.0)})
    os._exit(0)


def measure(size: int, tensors: int, end: str) -> dict[str, float]:
    """Has ranks join, agree, train, and lose one of them in a given way."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=act, args=(theirs, listener.getsockname(), size, tensors), daemon=True
    )
    process.start()
    theirs.close()  # So that its end is seen.
    before, cpu_s = read_memory(), time.process_time()
    rank_0 = Coordinator(listener, size, LIMITS, own=introduce(0, size))
    row = {"ranks": size, **ours.recv(), "join_cpu_s": time.process_time() - cpu_s}
    for part in ("agree", "train", "trace", end):
        cpu_s = time.process_time()
        ours.send(part)
        while part == "trace" and not ours.poll():
            sum(range(100))  # The main thread computes, and rarely gives up its lock.
        row |= ours.recv()
        if part == "train":
            row["cpu"] = (time.process_time() - cpu_s) / TRAIN_S
    row["mib"] = (read_memory() - before) / MIB
    rank_0.stop(timeout_s=5.0)
    ours.send("")
    process.join(5.0)
    return row


def read_memory() -> int:
    """Returns the bytes of memory that this process has in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main(options: Any, _: object) -> None:
    """Measures groups of ranks, and fails where one exceeds its bounds."""
    rows, faults = [], []
    for size in options.ranks:
        rows += [
            measure(size, options.tensors, end) for end in ("close", "fall silent")
        ]
        row = {
            name: max(one.get(name, 0.0) for one in rows[-2:])
            for name in rows[-2] | rows[-1]
        }
        print(", ".join(f"{name} {value:.4g}" for name, value in row.items()))
        bounds = BOUNDS.get(size, {})
        faults += [
            f"{size} ranks: {name} is {row[name]:.3g}, not below {most:g}"
            for name, most in bounds.items()
            if row[name] >= most
        ]
    save("side_channel", rows=rows)
    if faults:
        raise SystemExit("; ".join(faults))
