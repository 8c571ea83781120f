"""Whether parameter servers answer, and when a session's call is given up.

Servers are probed without TensorFlow. A dead server refuses the connection. A stopped
one does not: the kernel takes the connection in its stead. So the probe sends the
greeting of HTTP/2, which gRPC speaks, and waits for the first bytes of the answer.
"""

import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tw_core.black_box import Recorder
from tw_syncrep._timeouts.errors import (
    ServerLostError,
    StartTimeoutError,
    SyncTimeoutError,
)
from tw_syncrep._timeouts.reports import report_servers
from tw_syncrep.cluster._addresses import split_address

CHECK_EVERY_S = 0.5
"""Seconds between two checks during a call that takes long."""
_PROBE_S = 0.4
_GREETING = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
)


def find_fault(address: str, *, timeout_s: float = _PROBE_S) -> str | None:
    """Returns what is wrong with the server at ``address`` ("host:port").

    Args:
      address: of a server.
      timeout_s: after which a server that sends nothing counts as silent.

    Returns:
      None where it answers, else a few words.
    """
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
    """Probes several servers at the same time.

    Args:
      addresses: "host:port" by the task's name.

    Returns:
      "name (address) fault" by name, for those that do not answer.
    """
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
    """Checks the parameter servers during one call.

    Attributes:
      doing: what the call does, for the error.
      servers: "host:port" by task name.
      timeout_s: how long servers may be silent; None for no bound.
      limit_s: how long the call may take in all; None for no bound.
      unanswered: returns whether a question through the session got no answer,
        which is a silence like a server's own.
      failure: returns why the call is to be left behind, whatever servers say.
      probe: takes ``servers`` and returns faults by name.
      events: of the session.
      clock: seconds.
    """

    doing: str
    servers: Mapping[str, str]
    timeout_s: float | None
    limit_s: float | None = None
    unanswered: Callable[[], bool] = lambda: False
    failure: Callable[[], Exception | None] = lambda: None
    probe: Callable[[Mapping[str, str]], dict[str, str]] = find_faults
    events: Recorder = field(default_factory=lambda: Recorder("training_session"))
    clock: Callable[[], float] = time.monotonic
    _began: float = field(init=False)
    _answered: float = field(init=False)
    _silent_since: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """The call begins now."""
        self._began = self._answered = self.clock()

    def check(self) -> float:
        """Checks once.

        Returns:
          Seconds until the next check.

        Raises:
          ServerLostError: servers have been silent for too long.
          StartTimeoutError: the call takes too long, though servers answer.
          Exception: what ``failure`` returns.
        """
        failure = self.failure()
        if failure is not None:
            raise failure
        now = self.clock()
        faults = self.probe(self.servers)
        for fault in faults:
            self.events.noted("did not answer", fault, "a probe")
        if not faults and not self.unanswered():
            self._silent_since, self._answered = None, self.clock()
            self._check_limit(faults)
            return CHECK_EVERY_S
        if self._silent_since is None:
            # Since the last answer, unless this process has not asked for longer.
            self._silent_since = max(self._answered, now - CHECK_EVERY_S)
        silent_s = self.clock() - self._silent_since
        if self._is_too_long(silent_s):
            raise self._lost(faults, silent_s)
        self._check_limit(faults)
        if self.timeout_s is None:
            return CHECK_EVERY_S
        # The last question gets its answer, or none, when the time is over.
        return max(0.01, min(CHECK_EVERY_S, self.timeout_s - silent_s - _PROBE_S))

    def _is_too_long(self, silent_s: float) -> bool:
        if self.timeout_s is None:
            return False
        # Without addresses, the watchdog has already waited before it asked.
        return not self.servers or silent_s >= self.timeout_s

    def _lost(self, faults: Mapping[str, str], silent_s: float) -> SyncTimeoutError:
        named = "; ".join(faults.values()) or "the one that holds the global step"
        error = ServerLostError(
            f"training_session: {self.doing} has waited {self._elapsed():.1f} s, and "
            f"parameter servers have not answered for {silent_s:.1f} s "
            f"(wait_timeout_s is {self.timeout_s:g}): {named}. Restart them before the "
            "timeout, or start the whole run again from its last checkpoint.",
            servers=tuple(faults.values()),
            waited_s=self._elapsed(),
        )
        return self._with_report(error, faults, self.timeout_s)

    def _with_report(
        self,
        error: SyncTimeoutError,
        faults: Mapping[str, str],
        deadline_s: float | None,
    ) -> SyncTimeoutError:
        return report_servers(
            *(error, self.events),
            doing=self.doing,
            answering=[name for name in self.servers if name not in faults],
            faults=list(faults.values()),
            deadline_s=deadline_s or 0.0,
        )

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

    def _elapsed(self) -> float:
        return self.clock() - self._began
