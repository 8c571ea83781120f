"""Probes parameter servers, and decides when to abandon a session's call.

Servers are probed without TensorFlow. A dead server refuses the connection. A stopped
one does not: the kernel accepts the connection for it. So the probe sends the greeting
of HTTP/2, which gRPC speaks, and waits for the first bytes of the answer. Only servers
know whether they reach each other: a small graph crosses each pair of them.
"""

import errno
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations
from typing import TypeVar

import tensorflow as tf

from tw_core.internal import Recorder, Wait, add_report
from tw_launch.internal import split_address
from tw_syncrep._errors import (
    ServerLostError,
    StartTimeoutError,
    SyncTimeoutError,
)

_E = TypeVar("_E", bound=SyncTimeoutError)

CHECK_EVERY_S = 0.5
"""Seconds between two checks during a long call."""
_PROBE_S = 0.4
_CROSSING_MS = 1500
_REFUSED = os.strerror(errno.ECONNREFUSED)
_GREETING = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
)


def find_fault(address: str, *, timeout_s: float = _PROBE_S) -> str | None:
    """Describes the fault of the server at "host:port"; None if it has none."""
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


def find_parted(addresses: Mapping[str, str]) -> list[str]:
    """Tests servers, by "job index"; returns pairs that cannot reach each other."""

    def is_parted(pair: tuple[str, str]) -> bool:
        # A server that does not answer this process either is slow, not cut off.
        alone = all(_crosses(addresses[name], name) for name in pair)
        return alone and not _crosses(addresses[pair[0]], *pair)

    pairs = list(combinations(addresses, 2))
    with ThreadPoolExecutor(min(len(pairs), 16)) as pool:
        found = list(pool.map(is_parted, pairs))
    return [
        f"{one} ({addresses[one]}) and {other} ({addresses[other]})"
        for (one, other), parted in zip(pairs, found, strict=True)
        if parted
    ]


def _crosses(address: str, *names: str) -> bool:
    """Returns whether a tensor gets through the named tasks, from and to the first."""
    devices = ["/job:{}/task:{}".format(*name.split()) for name in names]
    with tf.Graph().as_default() as graph:
        with tf.device(devices[0]):
            tensor = tf.timestamp()
        for device in [*devices[1:], devices[0]]:
            with tf.device(device):
                tensor = tf.identity(tensor)
    config = tf.compat.v1.ConfigProto(
        device_filters=devices, operation_timeout_in_ms=_CROSSING_MS
    )
    try:
        with tf.compat.v1.Session(f"grpc://{address}", graph, config) as session:
            session.run(tensor)
    except (tf.errors.DeadlineExceededError, tf.errors.UnavailableError):
        return False
    except tf.errors.OpError:  # An error is an answer too.
        pass
    return True


@dataclass
class ServerMonitor:
    """Checks the parameter servers during one call."""

    doing: str  # what the call does, for errors
    servers: Mapping[str, str]  # "host:port" by task name
    timeout_s: float | None  # longest silence of servers
    limit_s: float | None = None  # longest time of the whole call
    unanswered: Callable[[], bool] = lambda: False  # a request in the session
    failure: Callable[[], Exception | None] = lambda: None  # why to abandon the call
    probe: Callable[[Mapping[str, str]], dict[str, str]] = find_faults
    events: Recorder = field(default_factory=lambda: Recorder("training_session"))
    clock: Callable[[], float] = time.monotonic
    patience_s: float | None = 0.0  # beyond timeout_s, where this task may be cut off
    remade_since: Callable[[], float | None] = lambda: None  # the session, by this call
    own: str = "this task"  # the task that servers must reach, for errors
    cross: Callable[[Mapping[str, str]], list[str]] = find_parted
    _began: float = field(init=False)
    _answered: float = field(init=False)
    _back_at: float = field(init=False)  # when servers answered after a silence
    _whole_at: float = field(init=False)  # when all servers last reached each other
    _cross_at: float | None = field(init=False, default=None)
    _silent_since: float | None = field(init=False, default=None)
    _was_cut_off: bool = field(init=False, default=False)  # in this silence

    def __post_init__(self) -> None:
        """Starts the call's clock."""
        now = self.clock()
        self._began = self._answered = self._back_at = self._whole_at = now
        if self.timeout_s is not None and len(self.servers) > 1:
            self._cross_at = now + self.timeout_s / 2

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
            self._answered = self.clock()
            if self._silent_since is not None:
                self._silent_since, self._back_at = None, self._answered
            self._was_cut_off = False
            self._check_remaking()
            self._check_parted()
        self._check_limit(faults)
        return pause_s

    def _check_silence(self, faults: Mapping[str, str], now: float) -> float:
        """Returns like ``check``, or raises if servers were silent for too long."""
        if self._silent_since is None:
            # Since the last answer, but without the time in which no probe was sent.
            self._silent_since = max(self._answered, now - CHECK_EVERY_S)
        if self.timeout_s is None:
            return CHECK_EVERY_S
        silent_s = self.clock() - self._silent_since
        limit_s = self.timeout_s
        if self._may_be_cut_off(faults):
            if self.patience_s is None:
                return CHECK_EVERY_S
            limit_s += self.patience_s
        # Without addresses, the watchdog reports silence, and has already waited.
        waited_before_s = 0.0 if self.servers else self.timeout_s
        if silent_s + waited_before_s >= limit_s:
            named = "; ".join(faults.values()) or self._name_unanswered()
            error = ServerLostError(
                f"training_session: {self.doing} has waited {self._elapsed():.1f} s, "
                f"and parameter servers have not answered for {silent_s:.1f} s "
                f"({self._bound(limit_s)}): {named}. {self._advice(faults)}",
                servers=tuple(faults.values()),
                waited_s=self._elapsed(),
            )
            raise self._with_report(error, _places(faults), limit_s)
        # The last probe must end at the deadline.
        return max(0.01, min(CHECK_EVERY_S, limit_s - silent_s - _PROBE_S))

    def _may_be_cut_off(self, faults: Mapping[str, str]) -> bool:
        """Returns whether no server answers, or has answered, and none refuses.

        After an outage of the network, TCP may need as long again before a call goes
        on.
        """
        if any(_REFUSED in fault for fault in faults.values()):
            self._was_cut_off = False
        elif len(faults) == len(self.servers):
            self._was_cut_off = True
        return self._was_cut_off

    def _name_unanswered(self) -> str:
        named = "the one that holds the global step"
        if not self.servers:
            return named
        return f"{named}, though all of them answer a probe"

    def _bound(self, limit_s: float) -> str:
        more_s = limit_s - (self.timeout_s or 0.0)
        more = f", and {more_s:g} s more for a replica cut off" if more_s else ""
        return f"wait_timeout_s is {self.timeout_s:g}{more}"

    def _advice(self, faults: Mapping[str, str]) -> str:
        look = (
            f"Perhaps they cannot reach {self.own}: check its port and its firewall. "
        )
        own = look if self.servers and not faults else ""
        if self.patience_s == 0.0:
            first = "Then" if own else "Restart them before the timeout, or"
            return f"{own}{first} restart the whole run from its last checkpoint."
        return own + (
            "Replicas that reach them go on without this one (elastic=True): if there "
            "are any, restart this one, and it joins them; otherwise restart the "
            "servers, and the whole run from its last checkpoint."
        )

    def _check_remaking(self) -> None:
        """Raises if recreating the session has taken too long, though all answer."""
        since = self.remade_since()
        if since is None or self.timeout_s is None or self.limit_s is not None:
            return
        remade_s = self.clock() - max(since, self._back_at)
        if remade_s < self.timeout_s:
            return
        error = SyncTimeoutError(
            f"training_session: {self.doing} has been losing and recreating its "
            f"session for {remade_s:.1f} s (wait_timeout_s is {self.timeout_s:g}), "
            "though all parameter servers answer. Either they cannot reach "
            f"{self.own}: check its port, its firewall, and whether TF_CONFIG has the "
            "same address on the servers. Or the chief has not restored the variables "
            "of a server that restarted: start the chief.",
            waited_s=self._elapsed(),
        )
        raise self._with_report(error, {}, self.timeout_s)

    def _check_parted(self) -> None:
        """Raises if servers have not reached each other for too long."""
        if self.timeout_s is None or self._cross_at is None:
            return
        now = self.clock()
        if now < self._cross_at:
            return
        parted = self.cross(self.servers)
        if not parted:
            self._whole_at = now
            self._cross_at = now + self.timeout_s / 2
        elif self.clock() - self._whole_at >= self.timeout_s:
            raise self.parted_error(parted)
        else:
            due = self._whole_at + self.timeout_s
            self._cross_at = min(self.clock() + self.timeout_s / 8, due)

    def explain(self, error: SyncTimeoutError) -> SyncTimeoutError:
        """Returns the error of a wait, or that of servers cut off from each other."""
        if isinstance(error, ServerLostError) or self._cross_at is None:
            return error
        parted = self.cross(self.servers)
        return self.parted_error(parted) if parted else error

    def parted_error(self, parted: Sequence[str]) -> ServerLostError:
        """Returns the error that names pairs of servers."""
        error = ServerLostError(
            f"training_session: {self.doing} has waited {self._elapsed():.1f} s "
            f"(wait_timeout_s is {self.timeout_s:g}); all parameter servers answer "
            f"this task, but cannot reach each other: {'; '.join(parted)}. Check the "
            "network between them.",
            servers=tuple(f"{pair} cannot reach each other" for pair in parted),
            waited_s=self._elapsed(),
        )
        missing = {pair: "cannot reach each other" for pair in parted}
        return self._with_report(error, missing, self.timeout_s or 0.0)

    def _check_limit(self, faults: Mapping[str, str]) -> None:
        if self.limit_s is None or self._elapsed() < self.limit_s:
            return
        servers = "; ".join(faults.values()) or "all parameter servers answer"
        error = StartTimeoutError(
            f"training_session: {self.doing} has taken {self._elapsed():.1f} s "
            f"(start_timeout_s is {self.limit_s:g}): {servers}. If they answer, the "
            "chief has not initialized the variables, or another task that the "
            "session needs is not running: start it, set device_filters, or raise "
            f"start_timeout_s. Or the servers cannot reach {self.own}: they use the "
            "address in their own TF_CONFIG, so a task that has moved to another "
            "address can join only after the servers have been restarted.",
            waited_s=self._elapsed(),
        )
        raise self._with_report(error, _places(faults), self.limit_s)

    def _with_report(
        self, error: _E, missing: Mapping[str, str], deadline_s: float
    ) -> _E:
        if not missing and self.servers:
            missing = {"the chief, or another task": "all parameter servers answer"}
        wait = Wait(
            who="training_session",
            what=f"an answer from the parameter servers to {self.doing}",
            waited_s=error.waited_s,
            deadline_s=deadline_s,
            arrived=[name for name in self.servers if name not in missing],
            missing=missing or {"a parameter server": "no addresses are known"},
        )
        return add_report(error, wait, self.events)

    def _elapsed(self) -> float:
        return self.clock() - self._began


def _places(faults: Mapping[str, str]) -> dict[str, str]:
    """Returns faults such as "(host:port) cannot be reached", without their names."""
    return {name: fault.removeprefix(f"{name} ") for name, fault in faults.items()}
