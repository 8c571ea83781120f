"""The processor time of rank 0's side-channel thread, by number of ranks.

Its logic receives the heartbeats of that many ranks, four per second each, and looks
for missing ranks 20 times per second. Lines are parsed and answers written, without
sockets and other processes, which would add a few system calls per heartbeat.
"""

import json
import socket
import statistics
import time
from dataclasses import asdict
from typing import Any

from racing import save

from tw_launch._channel import parse_line
from tw_ranks._side_channel._attendance import Deadlines, Report
from tw_ranks._side_channel._coordinator import Coordinator
from tw_ranks._side_channel._introduction import Introduction

OPTIONS = {"ranks": [16, 64, 256, 1024], "rounds": 3}
BEATS, LOOKS = 4, 20
"""A second, of a rank and of rank 0."""


class Line:
    """A connection that takes everything."""

    max_bytes = 0

    def send(self, message: dict[str, Any], *, timeout_s: float) -> None:
        json.dumps(message).encode()

    def send_line(self, line: bytes, *, timeout_s: float) -> None: ...

    def fileno(self) -> int:
        return 0

    def close(self) -> None: ...


class Simulated:
    """Rank 0's end, without its thread, and the lines of all ranks."""

    def __init__(self, size: int) -> None:
        ranks = [
            Introduction(rank, size, f"host{rank}:1", f"host{rank}", "m", {})
            for rank in range(size)
        ]
        listener = socket.create_server(("127.0.0.1", 0))
        limits = Deadlines(60.0, 600.0)
        self.rank_0 = Coordinator(listener, size, limits, own=ranks[0])
        self.rank_0.stop(timeout_s=10.0)
        self.lines = [Line() for _ in ranks]
        for line, own in zip(self.lines, ranks, strict=True):
            self.rank_0._unknown[line] = time.monotonic()
            self.rank_0._answer(line, {"do": "hello", "hello": asdict(own)})
        self.number = 0

    def second(self) -> None:
        """Has every rank beat, in a training of which each beat shows new steps."""
        of_each = LOOKS // BEATS
        for look in range(LOOKS):
            for rank in range(look % of_each, len(self.lines), of_each):
                self.number += 1
                report = Report(
                    self.number, self.number - 1, 1, "the sum", "train.py:9"
                )
                message = {"do": "beat", "report": asdict(report)}
                line = json.dumps(message).encode()
                self.rank_0._answer(self.lines[rank], parse_line(line))
            self.rank_0._look()


def main(options: Any, _: object) -> None:
    """Times joining and a second, and writes ``out/bench/side_channel.json``."""
    rows = []
    for size in options.ranks:
        start_s = time.process_time()
        simulated = Simulated(size)
        row = {"ranks": size, "join_s": time.process_time() - start_s}
        seconds = []
        for _ in range(options.rounds):
            start_s = time.process_time()
            simulated.second()
            seconds.append(time.process_time() - start_s)
        rows.append(row | {"second_s": statistics.median(seconds)})
        print(
            "{ranks:5} ranks: join {join_s:.3f} s, per second {second_s:.4f} s".format(
                **rows[-1]
            )
        )
    save("side_channel", rows=rows)
