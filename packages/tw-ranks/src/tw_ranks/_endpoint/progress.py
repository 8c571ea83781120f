"""How far this rank is in its collectives, which it reports to rank 0."""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

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
        self._among: dict[int, int] = {}  # ``Report.among`` by first key.
        self._of_owners = weakref.WeakKeyDictionary[Any, int]()
        self._owner: Any = None
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

        Several may be in progress at once: each has a place, which holds its key and 1.
        """
        counts = [1, 0, int(needs_all)] if begins else [0, 1, 0]
        slots = [0] * _SLOTS
        place = list(self._exchanges).index(key) % _SLOTS
        slots[place] = key + 1 if begins else -(key + 1)
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

    @contextlib.contextmanager
    def in_any_order(self, of: Any) -> Iterator[None]:
        """Scope in which exchanges belong to ``of``, not to the graph being traced."""
        before, self._owner = self._owner, of
        try:
            yield
        finally:
            self._owner = before

    def note_independent(self, key: int, graph: Any) -> None:
        """Notes an exchange of a graph, whose exchanges may begin in any order."""
        owner = graph if self._owner is None else self._owner
        own = self._among.setdefault(key, key)
        first, last = sorted((own, self._of_owners.setdefault(owner, own)))
        if first < last:  # It belongs to two: all exchanges of both do.
            for places in (self._among, self._of_owners):
                for one in [one for one, n in places.items() if n == last]:
                    places[one] = first

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

    def _find_in_functions(self) -> list[int]:
        """Returns the keys of exchanges in progress in functions, in order."""
        found = [number - 1 for number in self._read()[len(Counts._fields) :] if number]
        return sorted(found)

    def is_inside(self) -> bool:
        """Whether this rank is inside a collective, or one of its own has failed."""
        counts = self.read()
        return counts.entered > counts.completed

    def report(self, member: Member | None) -> Report:
        """Returns how far this rank is; ``member`` is None if it is alone."""
        counts = self.read()
        number, among, order, what = self._find_inside(counts, member)
        return Report(
            *(counts.entered, counts.completed, self._traced, self._inside),
            number=number,
            among=among,
            order=order,
            what=what,
            needing_all=counts.needing_all,
        )

    def _find_inside(
        self, counts: Counts, member: Member | None
    ) -> tuple[int, int, str, str]:
        """Returns a ``Report``'s number, among, order and what."""
        # Another thread may remove either meanwhile.
        waiting, hosted = self._waiting, [*self._hosted.values()]
        # Another thread may start the collective in which other ranks wait.
        is_alone = len(self._threads) == 1
        if waiting is not None and member is not None:
            number = -member.num_described
            return number if is_alone else 0, 0, "", f"the agreement on {waiting}"
        inside = counts.entered - counts.completed
        if hosted:
            key, blocks, order = hosted[0]
            exchange = self._exchanges.get(key) if inside == 1 else None
            number = key if blocks and is_alone else 0
            return (number, 0, order, str(exchange)) if exchange else (0, 0, "", "")
        keys = self._find_in_functions()
        exchange = self._exchanges.get(keys[0]) if keys and inside else None
        if exchange is None:
            return 0, 0, "", ""
        # Where those of several functions are in progress, others can begin.
        among = {self._among.get(key, key) + 1 for key in keys}
        number = keys[0] if is_alone and len(among) == 1 else 0
        return number, among.pop(), exchange.name, str(exchange)
