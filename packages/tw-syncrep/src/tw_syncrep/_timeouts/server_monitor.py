"""When a session's call is given up: what a look at the servers decides."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tw_syncrep._timeouts.errors import (
    ServerLostError,
    StartTimeoutError,
    SyncTimeoutError,
)
from tw_syncrep._timeouts.server_probe import find_faults

LOOK_EVERY_S = 0.5
"""Seconds between two looks at a call that takes long."""


@dataclass
class ServerWatch:
    """Looks at the parameter servers during one call.

    Attributes:
      doing: what the call does, for the error.
      servers: "host:port" by task name.
      timeout_s: how long servers may be silent; None for any time.
      limit_s: how long the call may take in all; None for any time.
      unanswered: tells whether a question through the session got no answer,
        which is a silence as a server's own is.
      probe: takes ``servers`` and returns faults by name.
    """

    doing: str
    servers: Mapping[str, str]
    timeout_s: float | None
    limit_s: float | None = None
    unanswered: Callable[[], bool] = lambda: False
    probe: Callable[[Mapping[str, str]], dict[str, str]] = find_faults
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)
    _silent_since: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """The call begins now."""
        self.began = self.clock()

    def look(self) -> float:
        """Looks once.

        Returns:
          Seconds until the next look.

        Raises:
          ServerLostError: servers have been silent for too long.
          StartTimeoutError: the call takes too long, though servers answer.
        """
        now = self.clock()
        faults = self.probe(self.servers)
        if not faults and not self.unanswered():
            self._silent_since = None
            self._check_limit(faults)
            return LOOK_EVERY_S
        if self._silent_since is None:
            self._silent_since = now
        silent_s = self.clock() - self._silent_since
        if self._is_too_long(silent_s):
            raise self._lost(faults, silent_s)
        self._check_limit(faults)
        rest = LOOK_EVERY_S if self.timeout_s is None else self.timeout_s - silent_s
        return max(0.01, min(LOOK_EVERY_S, rest))

    def _is_too_long(self, silent_s: float) -> bool:
        if self.timeout_s is None:
            return False
        # Without addresses, the guard has already waited before it asked.
        return not self.servers or silent_s >= self.timeout_s

    def _lost(self, faults: Mapping[str, str], silent_s: float) -> SyncTimeoutError:
        named = "; ".join(faults.values()) or "the one that holds the global step"
        return ServerLostError(
            f"training_session: {self.doing} has waited {self._elapsed():.1f} s, and "
            f"parameter servers have not answered for {silent_s:.1f} s "
            f"(wait_timeout_s is {self.timeout_s:g}): {named}. Restart them before the "
            "timeout, or start the whole run again from its last checkpoint.",
            servers=tuple(faults.values()),
            waited_s=self._elapsed(),
        )

    def _check_limit(self, faults: Mapping[str, str]) -> None:
        if self.limit_s is None or self._elapsed() < self.limit_s:
            return
        servers = "; ".join(faults.values()) or "all parameter servers answer"
        raise StartTimeoutError(
            f"training_session: {self.doing} has taken {self._elapsed():.1f} s "
            f"(start_timeout_s is {self.limit_s:g}): {servers}. Where they answer, the "
            "chief has not initialised the variables, or another task that the "
            "session needs is not there: start it, set device_filters, or raise "
            "start_timeout_s.",
            waited_s=self._elapsed(),
        )

    def _elapsed(self) -> float:
        return self.clock() - self.began
