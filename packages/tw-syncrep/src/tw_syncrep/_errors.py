"""Errors raised when a wait reaches its deadline or a replica loses its place."""

from collections.abc import Sequence

from tw_core.black_box import DeadlineError


class SyncTimeoutError(DeadlineError):
    """A wait has reached its deadline.

    Its ``report`` shows where each task was.

    Args:
      message: the text of the error.

    Attributes:
      step: the step that was waited for; None if none had begun.
      waited_s: seconds.
      arrived: numbers of the replicas, or ranks, whose gradients have arrived.
      missing: numbers of those that were waited for.
      heard_s: by replica, seconds since it was last heard from; None if it never was.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        waited_s: float = 0.0,
        arrived: Sequence[int] = (),
        missing: Sequence[int] = (),
        heard_s: Sequence[float | None] = (),
    ) -> None:
        super().__init__(message)
        self.step = step
        self.waited_s = waited_s
        self.arrived = tuple(arrived)
        self.missing = tuple(missing)
        self.heard_s = tuple(heard_s)


class ReplicaTimeoutError(SyncTimeoutError):
    """Replicas did not deliver their gradients in time."""


class RankTimeoutError(SyncTimeoutError):
    """Ranks did not take part in a collective in time, or have ended."""


class ChiefLostError(SyncTimeoutError):
    """The chief does not end the round, or is no longer heard from."""


class StartTimeoutError(SyncTimeoutError):
    """Replicas or the chief did not start in time."""


class ServerLostError(SyncTimeoutError):
    """Parameter servers do not answer, or do not reach each other.

    Attributes:
      servers: "ps 0 (host:port): what is wrong" for each of them.
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
            f"{replica} since this one was, and has its place: this one is to end. If "
            "both are meant to run, give one of them another task index."
        )
        self.replica = replica
