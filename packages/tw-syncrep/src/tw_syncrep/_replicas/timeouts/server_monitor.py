"""Probes parameter servers, and decides when a session's call is given up.

Servers are probed without TensorFlow. A dead server refuses the connection. A stopped
one does not: the kernel accepts the connection for it. So the probe sends the greeting
of HTTP/2, which gRPC speaks, and waits for the first bytes of the answer.
"""

import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tw_core.black_box import Recorder, Wait, add_report
from tw_syncrep._errors import (
    ServerLostError,
    StartTimeoutError,
    SyncTimeoutError,
)
from tw_syncrep.cluster._addresses import split_address

CHECK_EVERY_S = 0.5
"""Seconds between two checks during a call that takes long."""
_PROBE_S = 0.4
_GREETING = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
)


def find_fault(address: str, *, timeout_s: float = _PROBE_S) -> str | None:
    """Returns the fault of the server at "host:port" in a few words; None if none."""
    try:
        with socket.create_connection(split_address(address), timeout_s) as peer:
            peer.settimeout(timeout_s)
            peer.sendall(_GREETING)
            return None if peer.recv(1) else "closes connections"
    except TimeoutError:
        return f"does not answer within {timeout_s:g} s"
    except OSError as error:
        return f"cannot be reached ({error.strerror or error})"


def find_faults(addresses: Mapping[str, str]) -> dict[str, str]:
    """Probes servers in parallel; returns "name (address) fault" by name, if faulty."""
    if not addresses:
        return {}
    with ThreadPoolExecutor(min(len(addresses), 16)) as pool:
        faults = list(pool.map(find_fault, addresses.values()))
    return {
        name: f"{name} ({address}) {fault}"
        for (name, address), fault in zip(addresses.items(), faults, strict=True)
        if fault
    }


@dataclass
class ServerMonitor:
    """Checks the parameter servers during one call."""

    doing: str  # what the call does, for errors
    servers: Mapping[str, str]  # "host:port" by task name
    timeout_s: float | None  # longest silence of servers
    limit_s: float | None = None  # longest time of the whole call
    unanswered: Callable[[], bool] = lambda: False  # a question through the session
    failure: Callable[[], Exception | None] = lambda: None  # why to give the call up
    probe: Callable[[Mapping[str, str]], dict[str, str]] = find_faults
    events: Recorder = field(default_factory=lambda: Recorder("training_session"))
    clock: Callable[[], float] = time.monotonic
    _began: float = field(init=False)
    _answered: float = field(init=False)
    _silent_since: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Starts the call's clock."""
        self._began = self._answered = self.clock()

    def check(self) -> float:
        """Checks once; raises, or returns the seconds until the next check."""
        failure = self.failure()
        if failure is not None:
            raise failure
        now = self.clock()
        faults = self.probe(self.servers)
        for fault in faults:
            self.events.noted("did not answer", fault, "a probe")
        pause_s = CHECK_EVERY_S
        if faults or self.unanswered():
            pause_s = self._check_silence(faults, now)
        else:
            self._silent_since, self._answered = None, self.clock()
        self._check_limit(faults)
        return pause_s

    def _check_silence(self, faults: Mapping[str, str], now: float) -> float:
        """Returns as ``check``, or raises if servers were silent for too long."""
        if self._silent_since is None:
            # Since the last answer, except for time in which this process did not ask.
            self._silent_since = max(self._answered, now - CHECK_EVERY_S)
        if self.timeout_s is None:
            return CHECK_EVERY_S
        silent_s = self.clock() - self._silent_since
        # Without addresses, the watchdog reports silence, and has already waited.
        if not self.servers or silent_s >= self.timeout_s:
            named = "; ".join(faults.values()) or "the one that holds the global step"
            error = ServerLostError(
                f"training_session: {self.doing} has waited {self._elapsed():.1f} s, "
                f"and parameter servers have not answered for {silent_s:.1f} s "
                f"(wait_timeout_s is {self.timeout_s:g}): {named}. Restart them before "
                "the timeout, or start the whole run again from its last checkpoint.",
                servers=tuple(faults.values()),
                waited_s=self._elapsed(),
            )
            raise self._with_report(error, faults, self.timeout_s)
        # The last probe is to end when the time is over.
        return max(0.01, min(CHECK_EVERY_S, self.timeout_s - silent_s - _PROBE_S))

    def _check_limit(self, faults: Mapping[str, str]) -> None:
        if self.limit_s is None or self._elapsed() < self.limit_s:
            return
        servers = "; ".join(faults.values()) or "all parameter servers answer"
        error = StartTimeoutError(
            f"training_session: {self.doing} has taken {self._elapsed():.1f} s "
            f"(start_timeout_s is {self.limit_s:g}): {servers}. Where they answer, the "
            "chief has not initialized the variables, or another task that the "
            "session needs is not there: start it, set device_filters, or raise "
            "start_timeout_s.",
            waited_s=self._elapsed(),
        )
        raise self._with_report(error, faults, self.limit_s)

    def _with_report(
        self, error: SyncTimeoutError, faults: Mapping[str, str], deadline_s: float
    ) -> SyncTimeoutError:
        answering = [name for name in self.servers if name not in faults]
        # A fault reads "ps 0 (host:port) cannot be reached".
        named = (fault.partition(" (") for fault in faults.values())
        missing = {name: f"({rest}" for name, _, rest in named}
        if not missing and answering:
            missing["the chief, or another task"] = "all parameter servers answer"
        wait = Wait(
            who="training_session",
            what=f"an answer of the parameter servers to {self.doing}",
            waited_s=error.waited_s,
            deadline_s=deadline_s,
            arrived=answering,
            missing=missing or {"a parameter server": "no addresses are known"},
        )
        return add_report(error, wait, self.events)

    def _elapsed(self) -> float:
        return self.clock() - self._began
