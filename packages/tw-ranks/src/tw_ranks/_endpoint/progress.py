"""How far this rank is in its collectives, which it reports to rank 0."""

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

from tw_ranks import _tf_compat
from tw_ranks._agreement import Exchange
from tw_ranks._side_channel._attendance import Report
from tw_ranks._side_channel._member import Member

_SLOTS = 64  # for exchanges that a function may have in progress at once


class Counts(NamedTuple):
    """Collectives of this rank, from functions and from Python."""

    entered: int
    completed: int
    needing_all: int  # Of those entered, those that also need finished ranks.


class Progress:
    """Counts the collectives that this rank enters and completes."""

    def __init__(self) -> None:
        self._variable: tf.Variable | None = None
        self._lock = threading.Lock()
        self._entered = self._completed = self._needing_all = 0  # By calls from Python.
        self._hosted: dict[int, tuple[int, bool, str]] = {}  # Such calls in progress.
        self._threads: set[int] = set()  # That have begun collectives.
        self._exchanges: dict[int, Exchange] = {}  # By first key.
        self._waiting: Exchange | None = None  # Not yet described by all ranks.
        self._traced, self._inside = 0, ""  # ``Report.traced`` and ``Report.inside``.

    @property
    def variable(self) -> tf.Variable:
        """int64: ``Counts``, then exchanges in progress; a function adds ``marks``."""
        if self._variable is None:
            with tf.init_scope(), tf.device("/cpu:0"):
                self._variable = tf.Variable(
                    [0] * (len(Counts._fields) + _SLOTS),
                    dtype=tf.int64,
                    trainable=False,
                    name="tw_ranks_progress",
                )
        return self._variable

    def marks(self, key: int, *, begins: bool, needs_all: bool) -> list[int]:
        """Returns what a function adds as the exchange from ``key`` on begins or ends.

        Several may be in progress at once: each has a place of its own, if no more than
        ``_SLOTS`` are known.
        """
        counts = [1, 0, int(needs_all)] if begins else [0, 1, 0]
        slots = [0] * _SLOTS
        slots[list(self._exchanges).index(key) % _SLOTS] = 1 if begins else -1
        return [*counts, *slots]

    @contextlib.contextmanager
    def host_call(
        self, key: int, *, blocks: bool, needs_all: bool, order: str = ""
    ) -> Iterator[int]:
        """Scope of collectives from ``key`` on that run immediately, from Python.

        The program waits for them if they block; in a session, and in ``finish``, other
        collectives may start meanwhile. If they need all, ranks that have finished must
        take part, too. Those of one ``order``, in a function, run one after another.
        Yields the call's number; a call that raises is never completed.
        """
        with self._lock:
            self._entered += 1
            self._needing_all += needs_all
            number = self._entered
            self._hosted[number] = key, blocks, order
        yield number
        with self._lock:
            self._completed += 1
            del self._hosted[number]

    def note_thread(self) -> None:
        """Notes that this thread begins collectives."""
        self._threads.add(threading.get_ident())

    def note_traced(self, kind: str) -> None:
        """Notes that the program traces an exchange of this kind."""
        self._traced, self._inside = self.read().entered, kind

    def note_agreed(self, key: int, exchange: Exchange) -> None:
        """Notes the exchange whose first key this is."""
        self._exchanges[key] = exchange

    def note_waiting(self, exchange: Exchange | None) -> None:
        """Notes that this rank waits for all to describe an exchange; None: no more."""
        self._waiting = exchange

    def read(self) -> Counts:
        """Returns the counts of functions plus those of calls from Python."""
        entered, completed, needing_all = self._read()[: len(Counts._fields)]
        return Counts(
            self._entered + entered,
            self._completed + completed,
            self._needing_all + needing_all,
        )

    def _read(self) -> list[int]:
        if self._variable is None:
            return [0] * (len(Counts._fields) + _SLOTS)
        with _tf_compat.eager_mode():
            read: list[int] = self._variable.numpy().tolist()
            return read

    def _first_inside(self) -> int:
        """Returns the key of the first exchange in progress in a function, or 0."""
        slots = self._read()[len(Counts._fields) :]
        known = enumerate(list(self._exchanges))
        return next((key for n, key in known if slots[n % _SLOTS] > 0), 0)

    def is_inside(self) -> bool:
        """Whether this rank is inside a collective, or one of its own has failed."""
        counts = self.read()
        return counts.entered > counts.completed

    def report(self, member: Member | None) -> Report:
        """Returns how far this rank is; ``member`` is None if it is alone."""
        counts = self.read()
        number, order, what = self._find_inside(counts, member)
        return Report(
            *(counts.entered, counts.completed, self._traced, self._inside),
            number=number,
            order=order,
            what=what,
            needing_all=counts.needing_all,
        )

    def _find_inside(
        self, counts: Counts, member: Member | None
    ) -> tuple[int, str, str]:
        """Returns a ``Report``'s number, order and what."""
        # Another thread may remove either meanwhile.
        waiting, hosted = self._waiting, [*self._hosted.values()]
        # Another thread may start the collective in which other ranks wait.
        is_alone = len(self._threads) == 1
        if waiting is not None and member is not None:
            number = -member.num_described
            return number if is_alone else 0, "", f"the agreement on {waiting}"
        key, blocks, order = hosted[0] if hosted else (self._first_inside(), True, "")
        exchange = self._exchanges.get(key)
        inside = counts.entered - counts.completed
        if inside < 1 or (hosted and inside > 1) or exchange is None:
            return 0, "", ""
        order = order if hosted else exchange.name
        # With others in progress, this one keeps none from starting.
        number = key if blocks and is_alone and inside == 1 else 0
        return number, order, str(exchange)
