"""The share of skipped updates between two writings of statistics."""

from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any


class OverflowInterval:
    """Remembers the counts at the last writing.

    Attributes:
      finished: groups finished by then, since the counts began.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Starts at the counts in ``values``, a dictionary of statistics."""
        self._updates, self._skipped = _counts(values)
        self.finished = self._updates + self._skipped

    def close(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Ends an interval and begins the next.

        Args:
          values: statistics, as numbers.

        Returns:
          The same, with ``overflow_frequency`` that of the interval; as it came
          where no group finished in the interval.
        """
        updates, skipped = _counts(values)
        new_updates, new_skipped = updates - self._updates, skipped - self._skipped
        if new_updates < 0 or new_skipped < 0:  # the counts were reset meanwhile
            new_updates, new_skipped = updates, skipped
        closed = {name: float(value) for name, value in values.items()}
        if new_updates + new_skipped:
            share = new_skipped / (new_updates + new_skipped)
            closed["overflow_frequency"] = share
        self._updates, self._skipped = updates, skipped
        self.finished = updates + skipped
        return closed


def as_text(path: Any) -> Any:
    """Returns a path object as a string; anything else as it is."""
    return fspath(path) if isinstance(path, PathLike) else path


def _counts(values: Mapping[str, Any]) -> tuple[int, int]:
    return int(values["updates"]), int(values["skipped_updates"])
