"""Errors of waits for ranks."""

from tw_launch import StartTimeoutError as StartTimeoutError
from tw_launch import SyncTimeoutError as SyncTimeoutError


class RankTimeoutError(SyncTimeoutError):
    """Ranks did not take part in a collective in time, or have ended."""
