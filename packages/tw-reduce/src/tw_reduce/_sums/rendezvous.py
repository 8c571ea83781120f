"""How the devices of one reduction find each other, and wait for each other.

They find each other by keys. A key that was used must not be used for another
reduction, in this graph or any later one of the process: TensorFlow remembers its
shape. Only the caller knows which reducers run together, so the caller owns the object
that counts keys.

A reduction waits until every device has joined, but TensorFlow, in a session as in a
``tf.function``, runs only ops that lead to a result in use. So each tower's result is
made to wait for all results of the reduction.
"""

import functools
import random
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

from tw_core.devices import canonical_device
from tw_core.internal import (
    check_flag,
    check_function,
    check_number,
    check_whole_number,
    compiles_with_xla,
    host_of,
)
from tw_reduce._checks import check_device_strings
from tw_reduce._sums.arrivals import BoundedCalls, Reduction, note_all, plan_arrivals

_P = ParamSpec("_P")
_R = TypeVar("_R")
# TensorFlow's own strategies count upwards from 1.
_LOWEST = 1 << 20
_HIGHEST = 1 << 30
_REMEMBERED = 100
"""Number of reductions, the last ones built, that are searched when a call hangs."""


class CollectiveKeys:
    """Hands out keys, each once; one object serves any number of reducers.

    Args:
      start: the first key. None draws one at random, so that independent
        objects do not collide; processes that build one graph together must pass
        the same number.
      note_arrivals: whether reductions note which towers have reached them, for
        ``bounded``; once that has been called, they always do. Only session graphs,
        which are built before the call, need it.

    Raises:
      TypeError: ``start`` is not a whole number, or ``note_arrivals`` not a bool.
      ValueError: ``start`` is not between 1 and 2**30.
    """

    def __init__(
        self, start: int | None = None, *, note_arrivals: bool = False
    ) -> None:
        self._notes = check_flag(note_arrivals=note_arrivals)
        if start is None:
            start = random.SystemRandom().randrange(_LOWEST, _HIGHEST)
        elif not 1 <= check_whole_number(start=start) <= _HIGHEST:
            raise ValueError(
                f"CollectiveKeys: start must be between 1 and 2**30; got {start}. "
                "Leave it out to have one drawn."
            )
        self._next = start
        self._groups: dict[tuple[str, ...], int] = {}
        self._reductions: deque[Reduction] = deque(maxlen=_REMEMBERED)
        self._lock = Lock()

    def instance(self) -> int:
        """Returns the key of one new reduction."""
        with self._lock:
            return self._take()

    def group(self, devices: Sequence[str]) -> int:
        """Returns the key of a set of devices; the same for the same devices.

        Args:
          devices: in any spelling and order.

        Raises:
          TypeError: not a list of strings.
          ValueError: no device.
        """
        devices = check_device_strings(devices)
        members = tuple(sorted(canonical_device(d) for d in devices))
        with self._lock:
            if members not in self._groups:
                self._groups[members] = self._take()
            return self._groups[members]

    def bounded(
        self,
        function: Callable[_P, _R],
        *,
        timeout_s: float = 600.0,
        session: Any = None,
    ) -> Callable[_P, _R]:
        """Makes calls that reduce with these keys time out, naming the missing towers.

        Calls are made one at a time, in a separate thread, so that Ctrl-C ends the wait
        too; state of the caller's thread, such as a gradient tape or a default session,
        does not reach them. At the deadline a call is abandoned, since nothing can end
        it, and the function refuses further calls::

            keys = CollectiveKeys()
            step = keys.bounded(tf.function(train), timeout_s=60)

            keys = CollectiveKeys(note_arrivals=True)  # before the graph is built
            run = keys.bounded(session.run, session=session)

        Args:
          function: runs reductions, such as a ``tf.function`` or ``session.run``.
          timeout_s: seconds that a call may take; the first one includes tracing.
          session: in session graphs, where to read which towers have arrived.

        Returns:
          The function, which raises ``tw_core.DeadlineError`` instead of
          waiting longer. That is a ``TimeoutError``; its ``report`` names the
          reduction, the towers that have arrived there, and for how long.

        Raises:
          TypeError: ``function`` is not a function, or ``timeout_s`` not a number.
          ValueError: ``timeout_s`` is 0 or less.
        """
        check_function(function=function)
        check_number(timeout_s=timeout_s, above=0)
        self._notes = True
        calls = BoundedCalls(
            function,
            timeout_s=timeout_s,
            session=session,
            reductions=lambda: list(self._reductions),
        )
        # Works for any callable: wraps() skips attributes that it lacks.
        return functools.wraps(function)(lambda *a, **k: calls.call(*a, **k))

    def _take(self) -> int:
        self._next += 1
        return self._next - 1


def plan_reduction(
    keys: CollectiveKeys, what: str, devices: Sequence[str]
) -> Reduction:
    """Returns the record of a reduction that is being built."""
    if not keys._notes:
        return Reduction("", what, tuple(devices))
    found = plan_arrivals(f"tw_reduce_{keys.instance()}_at", what, devices)
    keys._reductions.append(found)
    return found


def check_keys(keys: CollectiveKeys) -> None:
    """Refuses anything but a ``CollectiveKeys``."""
    if not isinstance(keys, CollectiveKeys):
        raise TypeError(
            f"keys must be a CollectiveKeys; got {keys!r}. Make one CollectiveKeys() "
            "for all reducers of the process."
        )


def all_together(sums: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    """Returns [K] results of one reduction, each of which waits for all of them."""
    with tf.device(host_of(devices[0])):
        barrier = tf.group(*sums)
    return after(sums, devices, [barrier])


def in_turn(
    reduce: Callable[[int, Sequence[tf.Tensor]], list[tf.Tensor]],
    columns: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str],
    *,
    lock: str,  # a name that only these reductions use
    reduction: Reduction,
) -> list[list[tf.Tensor]]:
    """Reduces column n by ``reduce(n, column)``; steps in several threads take turns.

    Steps share the graph's keys. In functions the towers of one call would mix with
    those of another, and TensorFlow would end all collectives of the process; it keeps
    the runs of a session separate, but not while their devices first join.
    """
    inputs = [tensor for column in columns for tensor in column]
    with tf.device(host_of(devices[0])):
        mutex = tf.raw_ops.MutexV2(shared_name=lock)
        # Only once all gradients are ready: the holder of the lock waits for nothing.
        with tf.control_dependencies(inputs):
            held = tf.raw_ops.MutexLock(mutex=mutex)
    waiting = [after(column, devices, [held]) for column in columns]
    sums = [reduce(n, column) for n, column in enumerate(waiting)]
    ended = note_all(reduction, columns, sums)
    done = [total for column in sums for total in column]
    with tf.device(host_of(devices[0])), tf.control_dependencies([*done, *ended]):
        released = tf.raw_ops.ConsumeMutexLock(mutex_lock=held)
    return [after(column, devices, [released]) for column in sums]


def after(
    tensors: Sequence[tf.Tensor], devices: Sequence[str], before: Sequence[object]
) -> list[tf.Tensor]:
    """Returns [K] tensors, each on its device, that wait for ``before``."""
    tied = []
    for tensor, device in zip(tensors, devices, strict=True):
        with tf.device(device), tf.control_dependencies(before):
            tied.append(tf.identity(tensor))
    return tied


def check_traced() -> None:
    """Refuses modes in which the towers cannot wait for each other: eager, and XLA."""
    if tf.executing_eagerly():
        raise RuntimeError(
            "Collectives were called eagerly, where towers run one after the other and "
            "the first would wait forever. Call them in a tf.function, or use "
            "sum_balanced."
        )
    if compiles_with_xla():
        raise RuntimeError(
            "Collectives were called in a function with jit_compile=True, which XLA "
            "compiles for one device, without the ops that join several. Leave "
            "jit_compile out of the function that reduces (the towers' own may have "
            "it), or use sum_balanced."
        )
