"""Which steps are recorded, so that recording costs only a small share of a run."""

from statistics import median

LONG_MS = 20.0  # steps of at least this length are recorded one after another
SHARE = 0.05  # recording shorter steps may add this share of a run's time
PLAIN = 3  # steps that are timed before the first is recorded; the first one traces
WINDOW = 5  # shorter steps are recorded in windows of this many


class Pace:
    """Chooses the steps to record, and measures the time that recording adds.

    The first ``PLAIN`` steps are only timed. Steps of 20 ms and more are then recorded
    one after another, unless recording adds more than 5 % to them. These and shorter
    ones are sampled: a few, and then none until the time that recording added is at
    most 5 % of the time since.
    """

    def __init__(self, num_steps: int) -> None:
        self._wanted = num_steps
        self._plain: list[float] = []  # ms
        self._recorded: list[float] = []
        self.seen = 0  # steps so far
        self.windows = 0  # in which steps were recorded
        self._in_window = 0
        self._owed_ms = 0.0

    @property
    def is_done(self) -> bool:
        """Whether as many steps are recorded as were asked for."""
        return len(self._recorded) >= self._wanted

    @property
    def is_sampled(self) -> bool:
        """Whether steps are too short, or recording adds too much to them."""
        if not self._plain:
            return False
        return self.plain_ms < LONG_MS or (self.cost or 0.0) > SHARE

    @property
    def plain_ms(self) -> float:
        """Median time of a step that was not recorded; the first is left out."""
        return median(self._plain[1:] or self._plain)

    @property
    def cost(self) -> float | None:
        """The time that recording adds to a step, as a share of its time without."""
        if not self._recorded or len(self._plain) < 2:
            return None
        return median(self._recorded) / self.plain_ms - 1

    def records_next(self) -> bool:
        """Whether the next step is to be recorded."""
        if self.is_done or len(self._plain) < PLAIN:
            return False
        return not self.is_sampled or self._in_window > 0 or self._owed_ms <= 0

    def ends_window(self) -> bool:
        """Whether nothing more is to be recorded for now."""
        return self.is_done or (self.is_sampled and self._in_window >= WINDOW)

    def passed(self, ms: float, *, is_recorded: bool) -> None:
        """Notes a step that took ``ms`` milliseconds."""
        self.seen += 1
        if is_recorded:
            self.windows += self._in_window == 0
            self._recorded.append(ms)
            self._in_window += 1
            self._owed_ms += max(0.0, ms - self.plain_ms)
        else:
            self._plain.append(ms)
            self._owed_ms -= SHARE * ms

    def window_changed(self, ms: float) -> None:
        """Notes the milliseconds that it took to begin or to end a window."""
        if self.ends_window():
            self._in_window = 0
        self._owed_ms += ms
