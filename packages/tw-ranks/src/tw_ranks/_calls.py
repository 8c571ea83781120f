"""A rank's calls of collectives: what is agreed on, how far it is, who is missing."""

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tw_core import black_box
from tw_ranks import _tf_compat
from tw_ranks._agreement import Exchange, without_paths
from tw_ranks._engines.mpi import EndedError
from tw_ranks._errors import RankTimeoutError
from tw_ranks._interrupts import InterruptWatch
from tw_ranks._side_channel._attendance import (
    Deadlines,
    Report,
    describe_missing,
    describe_report,
)
from tw_ranks._side_channel._member import Member


class DifferenceError(tf.errors.FailedPreconditionError, ValueError):  # type: ignore[misc]
    """Ranks describe unlike exchanges; Horovod's programs expect TensorFlow's error."""


_log = logging.getLogger(__name__)
_MAX_COMPILED = 256
"""Each takes 0.3 MiB; a program with new shapes in every step never stops adding."""

_VERDICT_S = 2.0
_PROBED_S = 5.0
"""How long to wait for a verdict where connections between ranks are looked at."""

_STILL_S = 1.0
_AGREEMENT = "agreement on"


class Calls:
    """A rank's calls of collectives, which its side channel reports to rank 0."""

    def __init__(
        self,
        rank: int,
        tasks: Sequence[str],
        *,
        member: Member | None,
        limits: Deadlines,
        start_runtime: Callable[[], None] | None,
        engine: str,
        aborts: bool,
    ) -> None:
        """Takes ``member`` None of a rank that is alone.

        ``aborts`` says whether collectives do not end before TensorFlow aborts them.
        """
        self.member = member
        self.interrupts: InterruptWatch | None = None
        self.of_step: dict[int, Any] = {}  # Exchanges of a training step, by first key.
        # Session graphs in which an op holds a thread while it waits.
        self.holding_threads: weakref.WeakSet[Any] = weakref.WeakSet()
        self.is_proven = False  # NCCL's sums were compared.
        self.moved_s = time.monotonic()
        self._rank, self._tasks, self._limits = rank, tasks, limits
        self._start_runtime, self._aborts = start_runtime, aborts
        self._keys: dict[tuple[Exchange, int, bool], int] = {}
        self._exchanges: dict[int, Exchange] = {}  # By first key.
        self._paths: dict[str, str] = {}  # Rank 0's of variables, by this rank's.
        self._traced, self._inside = 0, ""
        self._compiled: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._entered = self._completed = self._needing_all = 0  # By calls from Python.
        self._hosted: dict[int, tuple[int, bool, str]] = {}  # Such calls in progress.
        self._waiting: Exchange | None = None  # Not yet described by all ranks.
        self._threads: set[int] = set()
        self._progress: tf.Variable | None = None
        self._uses: weakref.WeakKeyDictionary[Any, dict[Exchange, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock, self._describing = threading.Lock(), threading.RLock()
        self._name = f"rank {rank}"
        self._events = black_box.Recorder(
            f"ProcessGroup, rank {rank} of {len(tasks)}",
            facts={
                **{f"rank {r}": task for r, task in enumerate(tasks)},
                "engine": engine,
            },
        )
        self._reported = 0, 0
        self._reporting = threading.Lock()
        self._lost: RankTimeoutError | None = None

    def note_use(
        self,
        exchange: Exchange,
        graph: Any,
        num_keys: int,
        *,
        by_name: bool,
    ) -> int:
        """Returns the first of a collective's keys, on which all ranks agree.

        A collective that is built again, in another graph or after a change of the
        batch, keeps its keys; a second one of the same kind in one graph gets its own.
        Waits for all ranks if it is new, unless it is matched ``by_name``: named ones
        may be built in any order. ``graph`` is None if it runs immediately.
        """
        self._threads.add(threading.get_ident())
        with self._describing:
            uses = {} if graph is None else self._uses.setdefault(graph, {})
            # Variables may have new paths on some ranks alone: all compare them again.
            is_compared = exchange.of_variables and graph is None
            told = self._with_paths(exchange)
            known = without_paths(told) if is_compared else told
            place = uses.get(known, 0)
            key = self._keys.get((known, place, by_name))
            if key is None or is_compared:
                count = num_keys if key is None else 0
                found = self.agree(exchange, count, by_name=by_name)
                key = found if key is None else key
                told = self._with_paths(exchange)  # Rank 0 may have told others.
                known = known if is_compared else told
                self._keys[known, place, by_name] = key
                self._exchanges[key] = told
            uses[known] = place + 1
            if graph is not None:
                self._traced, self._inside = self._read_progress()[0], exchange.kind
        return key

    def agree(
        self, exchange: Exchange, num_keys: int = 0, *, by_name: bool = False
    ) -> int:
        """Waits until all ranks have described one exchange; returns its first key.

        Raises ValueError if their descriptions differ.
        """
        if self.member is None:
            return 0
        # Once all agree, some ranks may run it at once, which needs all ranks' servers.
        start_runtime, self._start_runtime = self._start_runtime, None
        if start_runtime is not None:
            start_runtime()
        what = f"{_AGREEMENT} {exchange.kind!r}"
        self._events.began(self._name, what, self.num_agreed)
        told = self._with_paths(exchange)
        self._waiting = None if by_name else told
        try:
            key, paths = self.member.agree(told, num_keys, by_name=by_name)
        except TimeoutError:  # The event stays open: this rank is still in it.
            raise self._as_error(self.member.missing) from None
        except BaseException as error:
            self._events.ended(self._name, what, self.num_agreed)
            if isinstance(error, ValueError):
                unlike = DifferenceError(None, None, str(error))
                raise _tf_compat.kept_by_autograph(unlike) from None
            raise
        finally:
            self._waiting = None
        self._events.ended(self._name, what, self.num_agreed)
        if paths:
            own = [tensor.name for tensor in exchange.tensors]
            self._paths.update(zip(own, paths, strict=True))
            _log.info(
                "Variables of other paths than rank 0's are paired by position: %s.",
                ", ".join(f"{one} with {self._paths[one]}" for one in own),
            )
        return key

    def _with_paths(self, exchange: Exchange) -> Exchange:
        """Describes variables by rank 0's paths, as far as it has told others."""
        if not self._paths:
            return exchange
        tensors = (
            replace(t, name=self._paths.get(t.name, t.name)) for t in exchange.tensors
        )
        return replace(exchange, tensors=tuple(tensors))

    def follow(self, is_over: Callable[[], bool], *, is_idle: bool) -> Exchange | None:
        """Waits for a collective that other ranks describe and this rank has not.

        Returns None if ``is_over``, which is called again after ``look_again``, or if
        all ranks are idle here: they take part in nothing meanwhile.
        """
        if self.member is None:
            return None
        try:
            return self.member.follow(is_over, is_idle=is_idle)
        except TimeoutError:
            raise self._as_error(self.member.missing) from None

    def wait_for(self, what: str) -> None:
        """Waits until rank 0 has told something."""
        if self.member is None:
            return
        told = f"rank 0 to tell {what!r}"
        self._events.began(self._name, told)
        try:
            self.member.wait_for(what)
        except TimeoutError:
            raise self._as_error(self.member.missing) from None
        self._events.ended(self._name, told)

    def look_again(self) -> None:
        """Makes ``follow`` call its ``is_over`` again."""
        if self.member is not None:
            self.member.look_again()

    @property
    def num_described(self) -> int:
        """The number of collectives matched by order; the same on all ranks."""
        return 0 if self.member is None else self.member.num_described

    @property
    def num_agreed(self) -> int:
        """The number of collectives on which ranks have agreed."""
        return len(self._keys)

    def compile(
        self, key: int, trace: Callable[[], Callable[..., Any]]
    ) -> Callable[..., Any]:
        """Returns the compiled function of a key; the last few hundred are kept."""
        with self._lock:
            compiled = self._compiled.pop(key, None)
        compiled = trace() if compiled is None else compiled
        with self._lock:
            self._compiled[key] = compiled
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    @property
    def progress(self) -> tf.Variable:
        """int64 [4]: collectives entered and completed, keys, collectives of all ranks.

        Each collective in a function adds to it before and after it runs. The third
        number is the sum of the keys of those that are running. The last counts those
        entered that also need ranks that have finished.
        """
        if self._progress is None:
            with tf.init_scope(), tf.device("/cpu:0"):
                self._progress = tf.Variable(
                    [0, 0, 0, 0],
                    dtype=tf.int64,
                    trainable=False,
                    name="tw_syncrep_progress",
                )
        return self._progress

    @functools.cached_property
    def ordering_token(self) -> tf.Variable:
        """What all of NCCL's collectives take, so that TensorFlow orders them."""
        with tf.init_scope():
            return tf.Variable(0.0, trainable=False, name="tw_syncrep_order")

    @contextlib.contextmanager
    def host_call(
        self, key: int, *, blocks: bool, needs_all: bool, order: str = ""
    ) -> Iterator[None]:
        """Scope of collectives from ``key`` on that run immediately, from Python.

        The program waits for them if they block; in a session, and in ``finish``, other
        collectives may start meanwhile. If they need all, ranks that have finished must
        take part, too. Those of one ``order``, in a function, run one after another.
        """
        with self._lock:
            self._entered += 1
            self._needing_all += needs_all
            number = self._entered
            self._hosted[number] = key, blocks, order
        with self.naming_missing(
            f"host call {number}"
        ):  # Several at once in a session.
            yield
        with self._lock:
            self._completed += 1
            del self._hosted[number]

    @contextlib.contextmanager
    def naming_missing(self, what: str) -> Iterator[None]:
        """Scope of collectives, ``what`` in reports; errors name missing ranks."""
        self._events.began(self._name, what)
        try:
            yield
        except (tf.errors.OpError, EndedError) as error:
            missing = self.find_missing(
                is_unavailable=isinstance(error, tf.errors.UnavailableError)
            )
            if self.interrupts is not None:
                self.interrupts.hear()
            if missing is None:
                raise
            raise missing from error
        self._events.ended(self._name, what)

    def find_missing(self, *, is_unavailable: bool = False) -> RankTimeoutError | None:
        """Returns the error behind a collective's error; None if no rank is missing.

        Where a rank's server ``is_unavailable``, ranks look at their connections.
        """
        if self.member is None:
            return None
        # An error from anything else, such as the end of a dataset, need not wait.
        wait_s = _VERDICT_S if self.is_inside() else 0.0
        if wait_s and is_unavailable:
            self.member.tell_failure()
            wait_s = _PROBED_S
        missing = self.member.wait_for_missing(wait_s)
        return self._as_error(missing) if missing else None

    def abort(self, missing: dict[int, str]) -> None:
        """Aborts this rank's collectives, as ranks are missing."""
        try:
            # While this rank is still inside the collective.
            text = black_box.report(self._wait(missing), self._events)
        except Exception:  # The report is made again with the error.
            text = ""
        if self._aborts:
            _tf_compat.abort_collectives(self._describe(missing))
        self._as_error(missing, text)

    def is_inside(self) -> bool:
        """Whether this rank is inside a collective, or one of its own has failed."""
        entered, completed, *_ = self._read_progress()
        return entered > completed

    def read_report(self) -> Report:
        """Returns how far this rank is."""
        entered, completed, keys, needing_all = self._read_progress()
        if (entered, completed) != self._reported:  # No Python runs inside a step.
            self._reported, self.moved_s = (entered, completed), time.monotonic()
            self._events.noted("was seen", self._name, "entered collective", entered)
        still_s = time.monotonic() - self.moved_s
        if entered > completed and still_s >= _STILL_S and self.member is not None:
            self.member.hold_connections()
        inside = self._find_inside(entered - completed, keys)
        number, order, what = inside
        return Report(
            *(entered, completed, self._traced, self._inside),
            number=number,
            order=order,
            what=what,
            needing_all=needing_all,
        )

    def _read_progress(self) -> tuple[int, int, int, int]:
        """Returns ``progress`` plus the calls from Python, except for their keys."""
        marks = [0, 0, 0, 0]
        if self._progress is not None:
            with _tf_compat.eager_mode():
                marks = self._progress.numpy().tolist()
        entered, completed, keys, needing_all = marks
        return (
            self._entered + entered,
            self._completed + completed,
            keys,
            self._needing_all + needing_all,
        )

    def _find_inside(self, num_inside: int, keys: int) -> tuple[int, str, str]:
        """Returns a ``Report``'s number, order and what."""
        # Another thread may take each of them away meanwhile.
        waiting, member, hosted = self._waiting, self.member, [*self._hosted.values()]
        # Another thread may start the collective in which other ranks wait.
        is_alone = len(self._threads) == 1
        if waiting is not None and member is not None:
            number = -member.num_described
            return number if is_alone else 0, "", f"the agreement on {waiting}"
        key, blocks, order = hosted[0] if hosted else (keys, True, "")
        exchange = self._exchanges.get(key)
        if num_inside != 1 or exchange is None:
            return 0, "", ""
        order = order if hosted else exchange.name
        return key if blocks and is_alone else 0, order, str(exchange)

    def _as_error(self, missing: dict[int, str], text: str = "") -> RankTimeoutError:
        """Returns an error; those of all threads share one report, made once."""
        wait = self._wait(missing)
        error = RankTimeoutError(
            self._describe(missing),
            waited_s=wait.deadline_s,
            arrived=sorted(set(range(len(self._tasks))) - set(missing)),
            missing=sorted(missing),
        )
        with self._reporting:
            if self._lost is None:
                self._lost = black_box.add_report(error, wait, self._events, text=text)
            else:
                error.report = self._lost.report
                error.report_path = self._lost.report_path
                error.add_note(self._lost.__notes__[0])
        return _tf_compat.kept_by_autograph(error)

    def _wait(self, missing: dict[int, str]) -> black_box.Wait:
        """Describes this rank's wait, and what is known about the other ranks."""
        own, member, now_s = self.read_report(), self.member, time.monotonic()
        states = member.states if member is not None else {}
        states = states or {self._rank: describe_report(own)}
        arrived: Collection[int] = member.arrived if member is not None else ()
        what = f"collective {own.entered + (own.completed == own.entered)}"
        if own.inside:
            what += f" (traced last: {own.inside!r})"
        since_s, deadline_s = self.moved_s, self._limits.timeout_s
        if now_s - since_s >= self._limits.stall_timeout_s:
            deadline_s = self._limits.stall_timeout_s
        for one in self._events.open:
            if one.what.startswith(_AGREEMENT):
                what, arrived = one.what, set(states) - set(missing)
                since_s, deadline_s = one.since_s, self._limits.first_timeout_s
        return black_box.Wait(
            who=self._name,
            what=what,
            waited_s=now_s - since_s,
            deadline_s=deadline_s,
            arrived=[f"rank {rank}" for rank in sorted(arrived or {self._rank})],
            missing={f"rank {rank}": why for rank, why in sorted(missing.items())},
            states={f"rank {rank}": state for rank, state in sorted(states.items())},
        )

    def _describe(self, missing: dict[int, str]) -> str:
        return describe_missing(missing, self._tasks, own=self._rank)
