"""Errors of waits that reach their deadline."""

from collections.abc import Sequence

from tw_core import DeadlineError


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


class StartTimeoutError(SyncTimeoutError):
    """Replicas or the chief did not start in time."""
