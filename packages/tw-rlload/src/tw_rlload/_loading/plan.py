"""How a batch is cut over towers and steps: pure arithmetic.

Data is in sequences of one length: one row each without states, several rows
each with them (recurrent models keep one state per sequence). A step gives every
device the same number of whole sequences. The order of rows is kept: device k
has the k-th part of the batch. Source: the layout of RLlib's
``LocalSyncParallelOptimizer`` (``multi_gpu_impl.py``).
"""

from dataclasses import dataclass
from itertools import pairwise
from string import ascii_uppercase
from typing import Literal, TypeAlias, get_args

from tw_core.internal import check_whole_number

Remainder: TypeAlias = Literal["drop", "pad", "error"]


@dataclass(frozen=True)
class LoadPlan:
    """The assignment of a batch's rows to devices and steps.

    Attributes:
      rows_given: rows of the batch, at least 1.
      num_devices: K, at least 1.
      sequence_length: rows of a sequence; 1 without states.
      sequences_per_device_step: B, sequences a device trains on in one step.
      steps: S, steps in an epoch.
      remainder: how sequences that do not fill a step are treated.
    """

    rows_given: int
    num_devices: int
    sequence_length: int
    sequences_per_device_step: int
    steps: int
    remainder: Remainder

    @property
    def sequences_given(self) -> int:
        """Sequences of the batch."""
        return self.rows_given // self.sequence_length

    @property
    def sequences_per_device(self) -> int:
        """Sequences a device holds, pads included."""
        return self.steps * self.sequences_per_device_step

    @property
    def rows_per_device(self) -> int:
        """Rows a device holds, pads included: the original's tuples per device."""
        return self.sequences_per_device * self.sequence_length

    @property
    def rows_per_device_step(self) -> int:
        """Rows a device trains on in one step."""
        return self.sequences_per_device_step * self.sequence_length

    @property
    def shards(self) -> tuple[range, ...]:
        """The sequences of each device, without pads; K ranges."""
        least, more = self.sequences_per_device, 0
        if self.remainder == "pad":
            least, more = divmod(self.sequences_given, self.num_devices)
        starts = [k * least + min(k, more) for k in range(self.num_devices + 1)]
        return tuple(range(*bounds) for bounds in pairwise(starts))

    @property
    def rows_loaded(self) -> int:
        """Rows of the batch that reach a device."""
        return sum(len(shard) for shard in self.shards) * self.sequence_length

    @property
    def rows_dropped(self) -> int:
        """Rows of the batch that are not loaded; the last ones."""
        return self.rows_given - self.rows_loaded

    @property
    def rows_padded(self) -> int:
        """Rows on the devices that are not rows of the batch."""
        return self.num_devices * self.rows_per_device - self.rows_loaded

    @property
    def batch_offsets(self) -> tuple[int, ...]:
        """Where each step starts, in rows of a device: 0, L, 2 L, ..."""
        return tuple(range(0, self.rows_per_device, self.rows_per_device_step))

    def drawing(self) -> str:
        """Draws the cut of a small batch.

        >>> plan = plan_load(21, 7, num_devices=2, max_per_device_batch_size=9)
        >>> print(plan.drawing())
        state     1     2     3     4     5     6     7
        row       A A A B B B C C C D D D E E E F F F G G G
        sequence  |---|                                      3 rows
        device 0  |---------------|                          9 rows, 1 step of 9
        device 1                    |---------------|        9 rows, 1 step of 9
        dropped                                       |---|  3 rows
        """
        length, given = self.sequence_length, self.sequences_given
        width = 2 * self.rows_given - 1
        letters = [ascii_uppercase[i % 26] for i in range(given)]
        numbers = [str(i + 1).ljust(2 * length) for i in range(given)]
        step = f"{_count(self.steps, 'step')} of {self.rows_per_device_step}"
        lines = [
            ("state", "".join(numbers), ""),
            ("row", " ".join(c for c in letters for _ in range(length)), ""),
            ("sequence", _bar(range(length)), _count(length, "row")),
        ]
        for k, shard in enumerate(self.shards):
            rows = range(shard.start * length, shard.stop * length)
            lines.append((f"device {k}", _bar(rows), f"{len(rows)} rows, {step}"))
        if self.rows_dropped:
            rows = range(self.rows_loaded, self.rows_given)
            lines.append(("dropped", _bar(rows), _count(len(rows), "row")))
        label = max(len(name) for name, _, _ in lines)
        drawn = [f"{a:<{label}}  {b:<{width}}  {c}" for a, b, c in lines]
        return "\n".join(line.rstrip() for line in drawn)


@dataclass(frozen=True)
class LoadReport(LoadPlan):
    """A plan that was carried out, and its size in bytes.

    Attributes:
      bytes_loaded: the batch on all devices together, pads included.
      bytes_resident: maximum on all devices together: a batch per buffer.
    """

    bytes_loaded: int
    bytes_resident: int


def plan_load(
    rows: int,
    states: int | None = None,
    *,
    num_devices: int,
    max_per_device_batch_size: int,
    remainder: Remainder = "drop",
) -> LoadPlan:
    """Cuts a batch into steps of equal size, the same number on every device.

    A step has as many whole sequences per device as fit in
    ``max_per_device_batch_size`` rows; fewer where the batch is too short for
    one such step.

    Args:
      rows: rows of the batch.
      states: sequences of the batch; None where each row is a sequence.
      num_devices: K.
      max_per_device_batch_size: maximum number of rows per device and step.
      remainder: sequences that do not fill a step are dropped (``"drop"``),
        completed with pads, spread over the devices (``"pad"``), or refused
        (``"error"``).

    Returns:
      The plan.

    Raises:
      TypeError: an argument is not a whole number.
      ValueError: no rows; rows not divisible by states; fewer sequences than
        devices; a maximum below one sequence; an unknown ``remainder``; rows
        left over where ``remainder="error"``.

    >>> plan_load(40_000, num_devices=2, max_per_device_batch_size=625).steps
    32
    """
    check_options(num_devices, max_per_device_batch_size, remainder)
    rows = check_whole_number(rows=rows)
    if states is not None:
        states = check_whole_number(states=states)
    return cut_batch(rows, states, num_devices, max_per_device_batch_size, remainder)


def check_options(
    num_devices: int, max_per_device_batch_size: int, remainder: str
) -> None:
    """Refuses options that no batch could be cut by."""
    check_whole_number(num_devices=num_devices, at_least=1)
    maximum = max_per_device_batch_size
    check_whole_number(max_per_device_batch_size=maximum, at_least=1)
    if not isinstance(remainder, str) or remainder not in get_args(Remainder):
        raise ValueError(
            f"remainder must be one of {list(get_args(Remainder))}; got {remainder!r}."
        )


def cut_batch(
    rows: int, states: int | None, num_devices: int, maximum: int, remainder: Remainder
) -> LoadPlan:
    """Plans like ``plan_load``, with checked options."""
    length = _sequence_length(rows, states)
    sequences = rows // length
    _check_fits(sequences, length, num_devices, maximum)
    pads = remainder == "pad"
    shortest = -(-sequences // num_devices) if pads else sequences // num_devices
    size = min(maximum // length, shortest)
    per_step = size * num_devices
    steps = -(-sequences // per_step) if pads else sequences // per_step
    plan = LoadPlan(rows, num_devices, length, size, steps, remainder)
    if remainder == "error" and plan.rows_dropped:
        raise ValueError(
            f"{rows} rows ({sequences} sequences of {length}) leave "
            f"{plan.rows_dropped} rows over in steps of {size * length} rows on each "
            f"of {num_devices} devices, and remainder is 'error'; pass a multiple of "
            f"{per_step * length} rows, or remainder='drop' or 'pad'."
        )
    return plan


def first_sequence(report: LoadReport, batch_index: int) -> int:
    """Returns the first sequence of the step that starts at row ``batch_index``."""
    offsets = report.batch_offsets
    first = check_whole_number(batch_index=batch_index)
    if first not in offsets:
        raise IndexError(
            f"batch_index must be one of report.batch_offsets, {list(offsets)}; got "
            f"{batch_index}."
        )
    return first // report.sequence_length


def _sequence_length(rows: int, states: int | None) -> int:
    if rows < 1 or (states is not None and states < 1):
        given = f"{rows} rows" if states is None else f"{rows} rows, {states} states"
        raise ValueError(
            f"There is nothing to load: got {given}; pass at least one row."
        )
    if states is None:
        return 1
    if rows % states:
        raise ValueError(
            f"{rows} rows cannot be divided among {states} states; every state stands "
            "for one sequence, and all sequences have the same number of rows: pad the "
            "shorter ones."
        )
    return rows // states


def _check_fits(sequences: int, length: int, num_devices: int, maximum: int) -> None:
    if maximum < length:
        raise ValueError(
            f"max_per_device_batch_size is {maximum} rows, and one sequence has "
            f"{length}; pass at least {length}, or cut shorter sequences."
        )
    if sequences < num_devices:
        raise ValueError(
            f"Every device needs at least one sequence; got {sequences} sequences of "
            f"{length} rows for {num_devices} devices. Pass at least "
            f"{num_devices * length} rows, or fewer devices."
        )


def _bar(rows: range) -> str:
    dashes = "-" * max(2 * len(rows) - 3, 0)
    return " " * (2 * rows.start) + (f"|{dashes}|" if len(rows) > 1 else "|")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
