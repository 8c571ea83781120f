"""A process group: the processes that train together, and this one's place among them.

Every process is one rank. TensorFlow's eager runtime becomes a cluster of all ranks,
over which its collectives run; the side channel knows which ranks are missing.
"""

import atexit
import contextlib
import functools
import os
import sys
import sysconfig
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import tensorflow as tf

from tw_core import black_box
from tw_syncrep import _tf_compat
from tw_syncrep._errors import ReplicaTimeoutError
from tw_syncrep.processes._agreement import Exchange
from tw_syncrep.processes._attendance import (
    Deadlines,
    Report,
    describe_missing,
    describe_report,
)
from tw_syncrep.processes._coordinator import Coordinator
from tw_syncrep.processes._interrupts import InterruptWatch
from tw_syncrep.processes._member import Member
from tw_syncrep.processes._side_channel import Introduction

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MAX_COMPILED = 256
"""Each takes 0.3 MiB; a program with new shapes in every step never stops adding."""

_VERDICT_S = 2.0
_AGREEMENT = "agreement on"
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib"))


class ProcessGroup:
    """The processes that train together, as one of them sees them.

    Made by ``join``. A process is one rank, however many towers it has.

    Attributes:
      rank: of this process, from 0.
      size: number of ranks.
      local_rank: of this process among those on its machine, from 0.
      local_size: number of ranks on this machine.
      node_rank: of this machine among all, in the order of their first ranks.
      num_nodes: number of machines.
      node_ranks: ``node_rank`` of every rank.
      tasks: "host, process 123" of every rank.
      has_left: whether this process has left the group.
    """

    def __init__(
        self,
        introductions: Sequence[Introduction],
        rank: int,
        *,
        member: Member | None,
        coordinator: Coordinator | None,
        limits: Deadlines,
        start_runtime: Callable[[], None] | None = None,
    ) -> None:
        """Called by ``join``."""
        own = introductions[rank].machine
        machines = list(dict.fromkeys(other.machine for other in introductions))
        here = [r for r, other in enumerate(introductions) if other.machine == own]
        self.rank, self.size = rank, len(introductions)
        self.local_rank, self.local_size = here.index(rank), len(here)
        self.node_rank, self.num_nodes = machines.index(own), len(machines)
        self.node_ranks = tuple(machines.index(o.machine) for o in introductions)
        self.tasks = tuple(other.task for other in introductions)
        self.has_left = False
        self._member, self._coordinator, self._limits = member, coordinator, limits
        self._start_runtime = start_runtime
        self._keys: dict[tuple[Exchange, int, bool], int] = {}
        self._exchanges: dict[int, Exchange] = {}  # By first key.
        self._traced, self._inside = 0, ""
        self._compiled: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self.of_step: dict[int, Any] = {}  # Exchanges of a training step, by first key.
        # Session graphs in which an op holds a thread while it waits.
        self.holding_threads: weakref.WeakSet[Any] = weakref.WeakSet()
        self._entered = self._completed = self._needing_all = 0  # By calls from Python.
        self._hosted: dict[int, tuple[int, bool]] = {}  # Such calls in progress.
        self._waiting: Exchange | None = None  # Not yet described by all ranks.
        self._threads: set[int] = set()
        self._progress: tf.Variable | None = None
        self._uses: weakref.WeakKeyDictionary[Any, dict[Exchange, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock, self._describing = threading.Lock(), threading.RLock()
        self._name = f"rank {rank}"
        self._events = black_box.Recorder(
            f"ProcessGroup, rank {rank} of {self.size}",
            facts={f"rank {r}": task for r, task in enumerate(self.tasks)},
        )
        self._reported, self._moved_s = (0, 0), time.monotonic()
        self._reporting = threading.Lock()
        self._lost: ReplicaTimeoutError | None = None
        self._exit = sys.exit
        self._exits: tuple[Any, float] = (None, 0.0)
        self._interrupts: InterruptWatch | None = None

    def __repr__(self) -> str:
        """Shows the rank and the size."""
        return f"ProcessGroup(rank={self.rank}, size={self.size})"

    def bounded(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Makes a function that runs collectives raise errors that name missing ranks.

        TensorFlow's error for a collective whose peer is lost does not name the rank.
        Wrap the function that calls collectives, e.g. the training step::

            @group.bounded
            @tf.function
            def step(images, labels): ...

        Args:
          function: runs collectives of this group.

        Returns:
          The function, raising ``ReplicaTimeoutError`` instead.
        """

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            self._events.began(self._name, "bounded call")
            try:
                result = function(*args, **kwargs)
            except tf.errors.OpError as error:
                missing = self._find_missing()
                self._hear_interrupt()
                if missing is None:
                    raise
                raise missing from error
            self._events.ended(self._name, "bounded call")
            return result

        return call

    def explain(self, message: str) -> str:
        """Returns an error's message, and the missing ranks, if there are any.

        For programs that do not wrap functions that run collectives in ``bounded``.

        Args:
          message: of the ``UnavailableError`` that a collective raises if it loses its
            peer or is aborted.
        """
        missing = self._find_missing()
        if missing is None or str(missing) in message:
            return message
        return "\n".join([message, str(missing), *missing.__notes__])

    def leave(self, *, timeout_s: float = 5.0) -> None:
        """Leaves the group; a process that ends leaves it automatically.

        Args:
          timeout_s: how long the others may take to complete the last exchange, and
            rank 0 to answer; seconds.
        """
        atexit.unregister(self._leave_at_exit)
        if sys.exit == self._note_exit:
            sys.exit = self._exit
        self.has_left = True
        if self._interrupts is not None:
            self._interrupts.close()
        if self._member is not None:
            self._member.leave(timeout_s=timeout_s)
            self._member = None
        if self._coordinator is not None:
            self._coordinator.stop(timeout_s=timeout_s)
            self._coordinator = None

    def note_use(self, exchange: Exchange, graph: Any, num_keys: int) -> int:
        """Returns the first of a collective's keys, on which all ranks agree.

        A collective that is built again, in another graph or after a change of the
        batch, keeps its keys; a second one of the same kind in one graph gets its own.
        Waits for all ranks if it is new, unless it is built under a name: named ones
        may be built in any order.

        Args:
          exchange: description of the collective.
          graph: where it is built; None if it runs immediately.
          num_keys: how many keys it needs.

        Raises:
          ValueError: ranks are about to exchange different tensors.
          ReplicaTimeoutError: a rank is missing.
        """
        self._threads.add(threading.get_ident())
        by_name = graph is not None and bool(exchange.name)
        with self._describing:
            uses = {} if graph is None else self._uses.setdefault(graph, {})
            place = uses.get(exchange, 0)
            uses[exchange] = place + 1
            key = self._keys.get((exchange, place, by_name))
            if key is None:
                key = self.agree(exchange, num_keys, by_name=by_name)
                self._keys[exchange, place, by_name] = key
                self._exchanges[key] = exchange
            if graph is not None:
                self._traced, self._inside = self._read_progress()[0], exchange.kind
        return key

    def agree(
        self, exchange: Exchange, num_keys: int = 0, *, by_name: bool = False
    ) -> int:
        """Waits until all ranks have described one exchange; returns its first key.

        Raises:
          ValueError: their descriptions differ.
          ReplicaTimeoutError: a rank is missing.
        """
        if self._member is None:
            return 0
        # Once all agree, some ranks may run it at once, which needs all ranks' servers.
        start_runtime, self._start_runtime = self._start_runtime, None
        if start_runtime is not None:
            start_runtime()
        what = f"{_AGREEMENT} {exchange.kind!r}"
        self._events.began(self._name, what, self.num_agreed)
        self._waiting = None if by_name else exchange
        try:
            key = self._member.agree(exchange, num_keys, by_name=by_name)
        except TimeoutError:  # The event stays open: this rank is still in it.
            raise self._as_error(self._member.missing) from None
        except BaseException:
            self._events.ended(self._name, what, self.num_agreed)
            raise
        finally:
            self._waiting = None
        self._events.ended(self._name, what, self.num_agreed)
        return key

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

    def follow(self, is_over: Callable[[], bool], *, is_idle: bool) -> Exchange | None:
        """Waits for a collective that other ranks describe and this rank has not.

        Args:
          is_over: whether to stop waiting; called again after ``look_again``.
          is_idle: whether this rank takes part in nothing meanwhile.

        Returns:
          Its description; None if ``is_over``, or if all ranks are idle here.

        Raises:
          ReplicaTimeoutError: a rank is missing.
        """
        if self._member is None:
            return None
        try:
            return self._member.follow(is_over, is_idle=is_idle)
        except TimeoutError:
            raise self._as_error(self._member.missing) from None

    def look_again(self) -> None:
        """Makes ``follow`` call its ``is_over`` again."""
        if self._member is not None:
            self._member.look_again()

    @property
    def num_agreed(self) -> int:
        """The number of collectives on which ranks have agreed."""
        return len(self._keys)

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

    @contextlib.contextmanager
    def host_call(self, key: int, *, blocks: bool, needs_all: bool) -> Iterator[None]:
        """Scope of collectives that run immediately, from Python.

        Args:
          key: their first key.
          blocks: whether the program waits for them; in a session, and in ``finish``,
            other collectives may start meanwhile.
          needs_all: whether ranks that have finished must take part, too.

        Raises:
          ReplicaTimeoutError: they fail or hang because a rank is missing.
        """
        with self._lock:
            self._entered += 1
            self._needing_all += needs_all
            number = self._entered
            self._hosted[number] = key, blocks
            if blocks:
                self._threads.add(threading.get_ident())
        what = f"host call {number}"  # A session may make several at once.
        self._events.began(self._name, what)
        try:
            yield
        except tf.errors.OpError as error:
            missing = self._find_missing()
            self._hear_interrupt()
            if missing is None:
                raise
            raise missing from error
        with self._lock:
            self._completed += 1
            del self._hosted[number]
        self._events.ended(self._name, what)

    def start(self) -> None:
        """Starts to report this rank's progress; called by ``join``."""
        if self._member is not None:
            self._member.start(self._read_report, self._abort)
            # A function of ``atexit`` cannot find out otherwise how the program ends.
            self._exit, sys.exit = sys.exit, self._note_exit
            give_up = functools.partial(
                self._member.give_up, "was interrupted (SIGINT)"
            )
            self._interrupts = InterruptWatch(self._is_inside, give_up)
            os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._leave_at_exit, os.getpid())

    def _note_exit(self, status: Any = None, /) -> NoReturn:
        """Notes the status, in place of ``sys.exit``."""
        if threading.current_thread() is threading.main_thread():
            self._exits = status, time.monotonic()
        self._exit(status)

    def _leave_at_exit(self, process: int) -> None:
        """Leaves the group; reports a failure first unless the program ended well."""
        if os.getpid() != process:
            return
        error, (status, exited_s) = getattr(sys, "last_value", None), self._exits
        has_gone_on = self._moved_s > exited_s + 0.5  # Beats notice moves late.
        why = ""
        if error is not None and not hasattr(sys, "ps1"):  # A prompt survives errors.
            why = f"has ended by an error of its own ({type(error).__name__})"
        elif status not in (None, 0) and not has_gone_on:
            why = "has ended by sys.exit with an error"
        if why and self._member is not None:
            self._member.fail(why, timeout_s=2.0)
        self.leave()

    def _hear_interrupt(self) -> None:
        if self._interrupts is not None:
            self._interrupts.hear()

    def _forget(self) -> None:
        """Makes a forked child drop everything that belongs to this rank.

        Otherwise it would say goodbye for the rank when it exits, and keep the rank's
        connections open after the rank is killed.
        """
        atexit.unregister(self._leave_at_exit)
        self.has_left = True
        if self._interrupts is not None:
            self._interrupts.close()
        for end in (self._member, self._coordinator):
            if end is not None:
                end.close_sockets()
        self._member = self._coordinator = None

    def _is_inside(self) -> bool:
        """Whether this rank is inside a collective, or one of its own has failed."""
        entered, completed, *_ = self._read_progress()
        return entered > completed

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
        waiting, hosted = self._waiting, list(self._hosted.values())
        # Another thread may start the collective in which other ranks wait.
        is_alone = len(self._threads) == 1
        if waiting is not None and self._member is not None:
            number = -self._member.num_described
            return number if is_alone else 0, "", f"the agreement on {waiting}"
        key, blocks = hosted[0] if hosted else (keys, True)
        exchange = self._exchanges.get(key)
        if num_inside != 1 or exchange is None:
            return 0, "", ""
        order = "" if hosted else exchange.name
        return key if blocks and is_alone else 0, order, str(exchange)

    def _read_report(self) -> Report:
        entered, completed, keys, needing_all = self._read_progress()
        if (
            entered,
            completed,
        ) != self._reported:  # No Python runs inside a step.
            self._reported, self._moved_s = (entered, completed), time.monotonic()
            self._events.noted("was seen", self._name, "entered collective", entered)
        inside = self._find_inside(entered - completed, keys)
        place = _find_place()
        return Report(
            *(entered, completed, self._traced, self._inside, place, *inside),
            needing_all=needing_all,
        )

    def _abort(self, missing: dict[int, str]) -> None:
        try:
            # While this rank is still inside the collective.
            text = black_box.report(self._wait(missing), self._events)
        except Exception:  # The report is made again with the error.
            text = ""
        _tf_compat.abort_collectives(self._describe(missing))
        self._as_error(missing, text)

    def _find_missing(self) -> ReplicaTimeoutError | None:
        """Returns the error behind a collective's error; None if no rank is missing."""
        if self._member is None:
            return None
        # An error from anything else, such as the end of a dataset, need not wait.
        wait_s = _VERDICT_S if self._is_inside() else 0.0
        missing = self._member.wait_for_missing(wait_s)
        return self._as_error(missing) if missing else None

    def _as_error(self, missing: dict[int, str], text: str = "") -> ReplicaTimeoutError:
        """Returns an error; those of all threads share one report, made once."""
        present = sorted(set(range(self.size)) - set(missing))
        wait = self._wait(missing)
        error = ReplicaTimeoutError(
            self._describe(missing),
            waited_s=wait.deadline_s,
            arrived=present,
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
        own, member, now_s = self._read_report(), self._member, time.monotonic()
        states = member.states if member is not None else {}
        states = states or {self.rank: describe_report(own)}
        arrived: Collection[int] = member.arrived if member is not None else ()
        what = f"collective {own.entered + (own.completed == own.entered)}"
        if own.inside:
            what += f" (traced last: {own.inside!r})"
        since_s, deadline_s = self._moved_s, self._limits.timeout_s
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
            arrived=[f"rank {rank}" for rank in sorted(arrived or {self.rank})],
            missing={f"rank {rank}": why for rank, why in sorted(missing.items())},
            states={f"rank {rank}": state for rank, state in sorted(states.items())},
        )

    def _describe(self, missing: dict[int, str]) -> str:
        return describe_missing(missing, self.tasks, own=self.rank)


def _find_place() -> str:
    """Returns the function and line of the program that the main thread is in."""
    frame = innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if (frame := frame or innermost) is None:
        return ""
    module = frame.f_globals.get("__name__", "?")
    return f"{module}.{frame.f_code.co_name}:{frame.f_lineno}"
