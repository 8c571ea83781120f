"""Notes which towers reach a reduction, and ends calls in which one does not.

A hanging call cannot report where it is. So each reduction has an op per tower that
notes when its gradients are ready, and one for the sums; the notes are read only if a
call misses its deadline. On a GPU gradients are "ready" when kernels are launched.

    tower k ── gradients ──▶ note k ─┐
    sums ────────────────▶ note K    │ on the first tower's host
    a call takes too long ── read ◀──┘ eagerly, or in the session that runs it

    session graph   a table that needs no initialiser, of times
    tf.function     counters with a handle each: TensorFlow would run other ops with
                    side effects, such as those on one table, in build order

The call is made in a thread, and abandoned at the deadline.
"""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, ParamSpec, TypeVar

import tensorflow as tf

from tw_core import DeadlineError
from tw_core.internal import (
    CallThread,
    Recorder,
    Wait,
    add_report,
    host_of,
    orders_effects,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")
_READ_S = 0.5
_SLACK_S = 0.01
"""Tolerance between the clocks of a step and of its call."""
_THE_SUM = "the sum"
_FIRST_TIME = 1e9
"""Marks below it are counts, above it times."""


@dataclass(frozen=True)
class Reduction:
    """One reduction, as it was built."""

    name: str  # unique
    what: str  # e.g. "sum_collective of 12 gradients"
    devices: tuple[str, ...]
    # In a session graph: its table's keys and values.
    export: tuple[tf.Tensor, tf.Tensor] | None = None
    # In a function: [K + 1] handles of int64 variables, the sums' last.
    counters: tuple[tf.Tensor, ...] = ()

    def read(self, session: Any) -> list[float]:
        """Returns [K + 1] marks, the sums' last; a tower with a higher mark waits.

        They are times, by ``time.time``, in session graphs, and counts in functions.
        """
        if self.export is None:
            return [
                float(tf.raw_ops.ReadVariableOp(resource=one, dtype=tf.int64))
                for one in self.counters
            ]
        if session is None:
            return []
        options = tf.compat.v1.RunOptions(timeout_in_ms=int(1000 * _READ_S))
        keys, values = session.run(self.export, options=options)
        times = dict(zip(map(int, keys), map(float, values), strict=True))
        return [times.get(k, 0.0) for k in range(len(self.devices) + 1)]


def plan_arrivals(name: str, what: str, devices: Sequence[str]) -> Reduction:
    """Makes the record of a reduction that is being built.

    In a function that a session graph calls, nothing is noted.
    """
    is_inside = orders_effects()
    with tf.init_scope(), tf.device(host_of(devices[0])):
        if tf.executing_eagerly():
            counters = [_counter(f"{name}_{k}") for k in range(len(devices) + 1)]
            return Reduction(name, what, tuple(devices), counters=tuple(counters))
        export = None
        if not is_inside:
            found = tf.raw_ops.LookupTableExportV2(
                table_handle=_table(name), Tkeys=tf.int64, Tvalues=tf.float64
            )
            export = found.keys, found.values
    return Reduction(name, what, tuple(devices), export)


def _note(reduction: Reduction, k: int, before: Sequence[object]) -> list[tf.Operation]:
    """Builds the op that notes tower k, or the sums as K, once ``before`` has run."""
    if not (reduction.export or reduction.counters):
        return []
    with tf.device(host_of(reduction.devices[0])), tf.control_dependencies(before):
        if reduction.counters:
            one = tf.constant(1, tf.int64)
            counter = reduction.counters[k]
            return [tf.raw_ops.AssignAddVariableOp(resource=counter, value=one)]
        return [
            tf.raw_ops.LookupTableInsertV2(
                table_handle=_table(reduction.name),
                keys=tf.constant([k], tf.int64),
                values=[tf.timestamp()],
            )
        ]


def note_all(
    reduction: Reduction,
    columns: Sequence[Sequence[tf.Tensor]],
    sums: Sequence[Sequence[tf.Tensor]],
) -> list[tf.Operation]:
    """Builds the ops that note when [N][K] gradients, and sums, are ready."""
    towers = range(len(reduction.devices))
    arrivals = [_note(reduction, k, [column[k] for column in columns]) for k in towers]
    noted = [op for ops in arrivals for op in ops]
    done = [total for column in sums for total in column]
    return _note(reduction, len(towers), [*noted, *done])


class BoundedCalls:
    """Makes calls in a thread, and abandons one that takes too long."""

    def __init__(
        self,
        function: Callable[_P, _R],
        *,
        timeout_s: float,
        session: Any,  # reads arrivals; None outside session graphs
        reductions: Callable[[], Sequence[Reduction]],  # in which a call may hang
    ) -> None:
        """Starts no thread yet."""
        self._function = function
        self._name = getattr(function, "__name__", None) or type(function).__name__
        self._timeout_s = timeout_s
        self._session = session
        self._reductions = reductions
        self._events = Recorder(f"calls of {self._name} that reduce over towers")
        self._turn = threading.Lock()
        self._thread: CallThread | None = None
        self._count = 0
        self._before: dict[str, list[float]] = {}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a call and waits for it."""
        with self._turn:
            if self._thread is not None and self._thread.is_abandoned:
                raise RuntimeError(
                    f"CollectiveKeys.bounded: an earlier call of {self._name} did not "
                    "return and was abandoned; a new call would mix with its towers. "
                    "Restart the program."
                )
            if self._thread is None:
                self._thread = CallThread("tw-reduce-call")
            self._count += 1
            began = time.time()

            def give_up() -> NoReturn:
                raise self._too_late(began)

            self._events.began(self._name, "call", self._count)
            try:
                return self._thread.run(
                    functools.partial(self._function, *args, **kwargs),
                    give_up,
                    after_s=self._timeout_s,
                )
            except BaseException:
                if not self._thread.is_abandoned:  # Towers may have arrived in vain.
                    self._before = {o.name: self._read(o) for o in self._reductions()}
                raise
            finally:
                if not self._thread.is_abandoned:
                    self._events.ended(self._name, "call", self._count)

    def _too_late(self, began: float) -> DeadlineError:
        """Returns the error of a call that takes too long, naming missing towers."""
        now = time.time()
        found = [(one, self._read_since(one)) for one in self._reductions()]
        waiting = [(one, marks) for one, marks in found if _is_waiting(marks, began)]
        if waiting:
            # In a function a reduction also waits for those that were built before it.
            waits = [_describe(*one, now) for one in waiting]
            wait = min(waits, key=lambda wait: _THE_SUM in wait.missing)
            come, others = ", ".join(wait.arrived), ", ".join(wait.missing)
            told = f"In {wait.what} {come} arrived, but not {others}."
        else:
            wait = Wait("", "the end of the call", 0.0, 0.0)
            is_known = any(marks for _, marks in found)
            told = "Towers have not reached any reduction."
            if not is_known:
                told = (
                    "The towers that have arrived are unknown: make CollectiveKeys("
                    "note_arrivals=True) before a session's graph, and pass session=."
                )
        error = DeadlineError(
            f"CollectiveKeys.bounded: {self._name} has taken {now - began:.1f} s "
            f"(timeout_s is {self._timeout_s:g}) and was abandoned. {told} Check what "
            "the towers that have not arrived are waiting for: input, or an op that "
            "hangs."
        )
        wait = replace(
            wait,
            who=f"{self._name}, call {self._count}",
            waited_s=now - began,
            deadline_s=self._timeout_s,
        )
        return add_report(error, wait, self._events)

    def _read_since(self, reduction: Reduction) -> list[float]:
        """Reads the marks; counts are those since the last call that failed."""
        marks = self._read(reduction)
        if reduction.export is None and (before := self._before.get(reduction.name)):
            marks = [now - then for now, then in zip(marks, before, strict=True)]
        return marks

    def _read(self, reduction: Reduction) -> list[float]:
        """Reads the marks; returns none if that fails, or hangs as well."""

        def give_up() -> NoReturn:
            raise TimeoutError

        read = functools.partial(reduction.read, self._session)
        try:
            return CallThread("tw-reduce-read").run(read, give_up, after_s=_READ_S)
        except Exception:  # Marks that cannot be read are unknown.
            return []


def _is_waiting(marks: Sequence[float], began: float) -> bool:
    """Returns whether a tower has arrived in this call, but not the sums."""
    if not marks:
        return False
    latest = max(marks[:-1])
    return latest > marks[-1] and (not _is_time(latest) or latest >= began - _SLACK_S)


def _describe(reduction: Reduction, marks: Sequence[float], now: float) -> Wait:
    """Returns the towers that have arrived and are missing, and where each one is."""
    *towers, sums = marks
    arrived, missing, states = [], {}, {}
    for k, (device, mark) in enumerate(zip(reduction.devices, towers, strict=True)):
        name = f"tower {k} ({device})"
        age = f"{now - mark:.1f} s" if _is_time(mark) else ""
        if mark > sums:
            arrived.append(name)
            states[name] = f"waits in {reduction.what}" + (age and f" for {age}")
        else:
            last = age and f"; last arrival {age} ago"
            states[name] = f"has not reached {reduction.what}{last}"
            missing[name] = "its gradients have not arrived"
    if not missing:
        missing[_THE_SUM] = "has not ended, though all towers have arrived"
    return Wait("", reduction.what, 0.0, 0.0, arrived, missing, states)


def _is_time(mark: float) -> bool:
    return mark > _FIRST_TIME


def _table(name: str) -> tf.Tensor:
    return tf.raw_ops.MutableHashTableV2(
        key_dtype=tf.int64, value_dtype=tf.float64, shared_name=name
    )


def _counter(name: str) -> tf.Tensor:
    """Makes an int64 variable that no Python object owns, so that none deletes it."""
    handle = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=name)
    zero = tf.constant(0, tf.int64)
    tf.raw_ops.AssignVariableOp(resource=handle, value=zero)
    return handle
