"""Drills of process groups: ranks are lost while all train; who lives must name them.

Every fault meets every victim, in each of three modes:

    fault        what happens                   victims   of 3 ranks: rank 0, rank 1;
    killed       SIGKILL                                  of 4 on two machines: the
    stopped      SIGSTOP                                  machine of ranks 2 and 3, of
    cut          the link is taken down                   the first three faults
    interrupted  SIGINT                         modes     function, session, buckets (of
    forked       SIGKILL, with a child that     a function, in another order in
                 lives on                       each rank)
    failed       an error ends its program; with buckets, that of an operation while
                 others of the step go on
    broken       an error ends its beats
    stuck        its main thread stops
    busy         the same, for a while
    strangers    send what they like to rank 0's port, which nobody must notice

What must hold: every living rank raises an error that names the missing ranks, no
fewer and no more, within ``TIMEOUT_S`` plus ``GRACE_S`` of the fault, within
``STALL_S`` plus that where the rank answers, and within ``GRACE_S`` alone where
processes were killed, failed or broken. Without rank 0 nobody knows of others, so that
alone is missing; and who is cut off misses rank 0, which misses all that it cannot
reach. Then every living process ends when it is told to. Where a rank is busy for
longer than ``TIMEOUT_S`` and answers, all train on.
"""

import contextlib
import json
import random
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from harness.ranks import Raised, RankProcess, Ranks
from harness.task_faults import GRACE_S, Outcome
from tw_launch._addresses import split_address
from tw_launch._channel import LineSocket
from tw_launch._key import prove

TIMEOUT_S, STALL_S, BUSY_S, VERDICT_S = 3.0, 6.0, 4.5, 2.0
FAULTS = ("killed", "stopped", "cut")
OWN_FAULTS = ("failed", "broken", "stuck", "busy")
SIGNALS = {
    "killed": signal.SIGKILL,
    "stopped": signal.SIGSTOP,
    "interrupted": signal.SIGINT,
    "forked": signal.SIGKILL,
}  # Else SIGUSR1, which the program heeds.
VICTIMS = {"rank 0": (0,), "rank 1": (1,), "machine": (2, 3)}
KINDS = {
    "function": "RankTimeoutError",
    "session": "UnknownError",
    "buckets": "RankTimeoutError",
}
MODES = tuple(KINDS)
OPTIONS = {
    "timeout_s": TIMEOUT_S,
    "stall_timeout_s": STALL_S,
    "first_timeout_s": 60.0,
    "start_timeout_s": 60.0,
}


@dataclass(frozen=True)
class Drill:
    """A fault of ``FAULTS`` or ``OWN_FAULTS``, a victim, and one of ``MODES``."""

    fault: str
    victim: str
    mode: str

    @property
    def machines(self) -> list[int]:
        """The machine of every rank."""
        if self.victim == "machine":
            return [0, 0, 1, 1]
        apart = [0, 1, 2]
        if self.fault == "cut":  # Whole machines.
            return apart
        # Rank 1 is the second of a machine, and the first of one.
        return {"function": [0, 0, 1], "session": [0, 1, 1]}.get(self.mode, apart)

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that the fault befalls."""
        return VICTIMS[self.victim]

    @property
    def living(self) -> list[int]:
        """The ranks that must raise: with a link that is cut, all."""
        ranks = range(len(self.machines))
        return [r for r in ranks if self.fault == "cut" or r not in self.lost]

    def named_by(self, rank: int) -> list[int]:
        """Returns whom a living rank must name."""
        is_apart = rank in self.lost
        if rank == 0:
            others = range(1, len(self.machines))
            return list(others) if is_apart else list(self.lost)
        return [0] if is_apart or 0 in self.lost else list(self.lost)

    @property
    def deadline_s(self) -> float:
        if self.fault == "stuck":
            return STALL_S
        if (self.fault, self.mode) == ("failed", "buckets"):
            return VERDICT_S
        at_once = ("killed", "failed", "broken", "interrupted", "forked")
        return 0.0 if self.fault in at_once else TIMEOUT_S


GREETING = {
    **{"rank": 1, "size": 3, "address": "a:1", "task": "a", "machine": "a"},
    **{"versions": {}, "run": "", "start": 0},
}
NOISES = [
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\xff" * 5_000 + b"\n",
    b"[" * 200_000 + b"\n",
    b'{"do":' * 10_000 + b"\n",
    b"9" * 60_000 + b"\n",
    b"x" * (1 << 20),
    b"\n" * 1_000,
    b"[]\n",
    b'{"do": 1}\n',
    b'{"hello": {}}\n',
    b'{"do": "hello", "hello": {"rank": NaN}}\n',
    *(
        json.dumps({"do": "hello", "hello": {**GREETING, **changes}}).encode()
        + b'\n{"do": "beat", "report": {}}\n{"do": "bye"}\n'
        for changes in (
            *({"rank": -1}, {"rank": 1 << 70}, {"rank": "1"}, {"size": 1e308}),
            *({"size": 9}, {"versions": 5}, {"address": 7}, {"task": None}, {"x": 0}),
        )
    ),
    b'{"do": "hello", ',
    b"",
]
"""What strangers send, none of which makes them a rank."""

_ALL_FAULTS = (*FAULTS, "interrupted", "forked", *OWN_FAULTS)
_ROWS = [
    Drill(fault, victim, mode)
    for victim, fault, mode in product(VICTIMS, _ALL_FAULTS, MODES)
    if fault in FAULTS or victim != "machine"
]
_ROWS += [Drill("strangers", "rank 0", mode) for mode in MODES]
DRILLS = {f"processes: {row.victim} {row.fault}, {row.mode}": row for row in _ROWS}


def run_drill(context: Any, name: str, folder: Path | None = None) -> Outcome:
    """Runs one trial in a group of its own, of which no process is left."""
    drill = DRILLS[name]
    after_s: list[float] = []
    failure, ranks = "", None
    try:
        ranks = Ranks(
            context,
            len(drill.machines),
            machines=drill.machines,
            linked=is_linked(name),
            is_quiet=True,
            bucket_bytes=1 if drill.mode == "buckets" else None,
            **OPTIONS,
        )
        ranks.joined()
        if drill.fault == "strangers":
            _disturb(ranks, drill.mode)
            return Outcome()
        for rank in drill.lost if drill.fault == "forked" else ():
            ranks.all[rank].say("fork")
            ranks.all[rank].hear()
        _train(ranks, drill)
        began_s = _harm(ranks, drill)
        if drill.fault == "busy":
            time.sleep(BUSY_S + 1.0)
            _assert_train(ranks)
        else:
            for rank in drill.living:
                after_s.append(_hear_error(ranks.all[rank], drill, began_s))
            _end(ranks, drill)
    except (AssertionError, TimeoutError, EOFError, Raised) as error:
        failure = str(error) or type(error).__name__
    finally:
        if ranks is not None:
            ranks.end()
    beyond_s = max((one - drill.deadline_s for one in after_s), default=None)
    return Outcome(failure, beyond_s)


def is_linked(name: str) -> bool:
    """Returns whether a drill takes links down."""
    return DRILLS[name].fault == "cut"


def _train(ranks: Ranks, drill: Drill) -> None:
    """Has all train; returns at some moment of it."""
    if drill.fault in OWN_FAULTS:
        busy_s = BUSY_S if drill.fault == "busy" else 600.0
        ranks.call("heed_signal", drill.fault, drill.mode, busy_s)
    want = [3 * len(ranks.all)] * len(ranks.all)
    assert ranks.call("step_until", 3, drill.mode) == want
    for rank in ranks.all:
        rank.say("step_until", None, drill.mode)
    time.sleep(random.uniform(0.3, 1.3))
    _assert_train(ranks)


def _assert_train(ranks: Ranks) -> None:
    for rank in ranks.all:
        assert not rank.pipe.poll(), f"rank {rank.rank} said: {rank.hear()}"


def _disturb(ranks: Ranks, mode: str) -> None:
    """Has all train while strangers come and go, and some stay."""
    address, is_over = split_address(ranks.address), threading.Event()

    def make_noise() -> None:
        with contextlib.ExitStack() as stack:
            for noise in NOISES:
                stack.enter_context(send_raw(address, noise))
                stack.enter_context(send_proved(address, noise))
            while not is_over.is_set():
                for send in (send_raw, send_proved):
                    with contextlib.suppress(OSError):  # Others make room for more.
                        send(address, random.choice(NOISES)).close()

    size = len(ranks.all)
    with ThreadPoolExecutor(1) as pool:
        noisy = pool.submit(make_noise)
        try:
            assert ranks.call("step_until", 500, mode) == [500 * size] * size
        finally:
            is_over.set()
        noisy.result(10)


def send_proved(
    address: tuple[str, int], *parts: bytes, key: str = "", door: str = "rank 0"
) -> socket.socket:
    """Proves to have a key, then sends bytes as they are."""
    client = socket.create_connection(address, 10)
    prove(LineSocket(client), key, door, timeout_s=10.0)
    client.settimeout(10)
    with contextlib.suppress(OSError):
        for part in parts:
            client.sendall(part)
    return client


def send_raw(address: tuple[str, int], *parts: bytes) -> socket.socket:
    """Sends bytes as they are; returns the connection."""
    client = socket.create_connection(address, 10)
    with contextlib.suppress(OSError):  # It is dropped as soon as it is recognized.
        for part in parts:
            client.sendall(part)
    return client


def _harm(ranks: Ranks, drill: Drill) -> float:
    """Does harm; returns when."""
    began_s = time.monotonic()
    if drill.fault == "cut":
        ranks.cut(drill.machines[drill.lost[0]])
    else:
        number = SIGNALS.get(drill.fault, signal.SIGUSR1)
        for rank in drill.lost:
            ranks.all[rank].send(number)
    return began_s


def _hear_error(rank: RankProcess, drill: Drill, began_s: float) -> float:
    """Has a rank raise the right error in time; returns after how many seconds."""
    try:
        rank.hear(STALL_S + 30)
    except Raised as error:
        after_s, raised = error.at_s - began_s, error
    else:
        raise AssertionError(f"rank {rank.rank} trained to an end")
    told = f"rank {rank.rank} after {after_s:.2f} s: {raised}"
    assert raised.kind == KINDS[drill.mode], told
    named = drill.named_by(rank.rank)
    if drill.mode != "session":
        assert raised.missing == named, told
    in_text = sorted({int(n) for n in re.findall(r"rank (\d+) \(", raised.text)})
    assert in_text == named, told
    assert after_s <= drill.deadline_s + GRACE_S, f"too late: {told}"
    return after_s


def _end(ranks: Ranks, drill: Drill) -> None:
    """Has every living process end by itself."""
    for rank in drill.living:
        ranks.all[rank].pipe.close()
    for rank in drill.living:
        ranks.all[rank].process.join(10)
        assert not ranks.all[rank].process.is_alive(), f"rank {rank} has not ended"
