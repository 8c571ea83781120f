"""Errors raised when a wait reaches its deadline or a replica loses its place."""

from collections.abc import Sequence

from tw_launch import StartTimeoutError as StartTimeoutError
from tw_launch import SyncTimeoutError as SyncTimeoutError


class ReplicaTimeoutError(SyncTimeoutError):
    """Replicas did not deliver their gradients in time."""


class ChiefLostError(SyncTimeoutError):
    """The chief did not end the round in time, or has fallen silent."""


class ServerLostError(SyncTimeoutError):
    """Parameter servers do not answer, or cannot reach each other.

    Attributes:
      servers: "ps 0 (host:port) <fault>" for each server or pair of servers at fault.
    """

    def __init__(
        self, message: str, *, servers: Sequence[str] = (), waited_s: float = 0.0
    ) -> None:
        super().__init__(message, waited_s=waited_s)
        self.servers = tuple(servers)


class ReplicaReplacedError(RuntimeError):
    """Another process has taken this replica's number.

    Attributes:
      replica: the number.
    """

    def __init__(self, replica: int) -> None:
        super().__init__(
            "SyncReplicasOptimizer: another process has been started as replica "
            f"{replica} and has replaced this one, which must end. If both are meant "
            "to run, give one of them another task index."
        )
        self.replica = replica
