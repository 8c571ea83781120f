"""One thread per tower, none of which waits for another.

One session call or ``tf.function`` that holds all towers is not asynchronous:
it ends when the slowest tower does. Here every tower has its own callable, such as
``sess.make_callable(op)`` or a ``tf.function``.
"""

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import tensorflow as tf

from tw_core import DeadlineError
from tw_core.internal import (
    Recorder,
    Wait,
    add_report,
    check_function,
    check_list,
    check_number,
    check_whole_number,
)

_SECONDS_AFTER_CTRL_C = 5.0


class TowerError(RuntimeError):
    """One or more towers raised; their errors by tower name.

    Attributes:
      errors: tower name -> the exception.
    """

    def __init__(self, errors: dict[str, BaseException]) -> None:
        """Describes each tower's error."""
        listed = "; ".join(
            f"{name}: {type(error).__name__}: {error}" for name, error in errors.items()
        )
        super().__init__(f"AsyncRunner: {len(errors)} towers failed: {listed}")
        self.errors = errors


class AsyncRunner:
    """Runs one step function per tower over and over, each in its own thread.

    When a tower raises, the others stop after their current step.

    Attributes:
      steps_done: finished steps of each tower, so far.
    """

    def __init__(
        self, steps: Sequence[Callable[[], Any]], *, max_steps: int | None = None
    ) -> None:
        """Stores the towers' steps; nothing runs before ``start``.

        Args:
          steps: K callables without arguments, tower 0's first. StopIteration
            and ``tf.errors.OutOfRangeError`` end a tower normally: it has run out
            of data.
          max_steps: steps of each tower; None runs until ``stop``.

        Raises:
          ValueError: no callable, or ``max_steps`` below 0.
          TypeError: an item that cannot be called, ``steps`` that are not a list, or
            ``max_steps`` that is not a whole number.
        """
        check_list(steps=steps, of="callables")
        if not all(callable(step) for step in steps):
            raise TypeError(f"AsyncRunner: steps must be callables; got {list(steps)}.")
        if max_steps is not None:
            check_whole_number(max_steps=max_steps, at_least=0)
        self._steps = list(steps)
        self._max_steps = max_steps
        self.steps_done = [0] * len(steps)
        self._errors: dict[str, BaseException] = {}
        self._stopping = threading.Event()
        # Not Thread.is_alive: it is False once a join was interrupted (bpo-46726).
        self._ended: dict[str, threading.Event] = {}
        self._events = Recorder(f"AsyncRunner of {len(steps)} towers")

    def start(self) -> "AsyncRunner":
        """Starts the threads.

        Raises:
          RuntimeError: the runner was started before.
        """
        if self._ended:
            raise RuntimeError("AsyncRunner.start: was started before; make a new one.")
        try:
            for k in range(len(self._steps)):
                name, ended = f"tower{k}", threading.Event()
                threading.Thread(
                    target=self._run, args=(k, ended), name=name, daemon=True
                ).start()
                self._ended[name] = ended
        except BaseException:  # no more threads available, or Ctrl-C
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Asks every tower to end after its current step; does not wait."""
        self._stopping.set()

    def join(self, timeout_s: float | None = 60.0) -> list[int]:
        """Waits until every tower has ended.

        On Ctrl-C it stops the towers, waits at most 5 seconds for their current steps,
        and raises KeyboardInterrupt.

        Args:
          timeout_s: seconds to wait, for all towers together; None for no bound.

        Returns:
          Finished steps of each tower.

        Raises:
          TowerError: towers raised.
          DeadlineError: a TimeoutError; towers still run after ``timeout_s``. They are
            named, and those inside one step for half of that time or longer are
            reported as hanging. A thread cannot be ended from outside: call ``stop``
            and ``join`` again, or end the operation that it waits for.
          RuntimeError: the runner was not started.
          TypeError: ``timeout_s`` is not a number.
          ValueError: ``timeout_s`` is below 0, infinite or NaN.
        """
        if timeout_s is not None:
            check_number(timeout_s=timeout_s, at_least=0)
        if not self._ended:
            raise RuntimeError("AsyncRunner.join: was not started; call start() first.")
        try:
            self._wait(timeout_s)
        except BaseException:  # Ctrl-C: nothing else would stop them
            self.stop()
            bound = _SECONDS_AFTER_CTRL_C
            self._wait(bound if timeout_s is None else min(timeout_s, bound))
            raise
        running = [name for name, ended in self._ended.items() if not ended.is_set()]
        if running and timeout_s is not None:
            cause = next(iter(self._errors.values()), None)
            raise self._too_late(running, timeout_s) from cause
        if self._errors:
            raise TowerError(self._errors) from next(iter(self._errors.values()))
        return list(self.steps_done)

    @property
    def is_running(self) -> bool:
        """Whether a tower still runs."""
        return not all(ended.is_set() for ended in self._ended.values())

    def __enter__(self) -> "AsyncRunner":
        """Starts the threads."""
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops the towers and waits for them; their errors are raised."""
        self.stop()
        if kind is None:
            self.join()
        else:
            self._wait(60.0)

    def _wait(self, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for ended in self._ended.values():
            left_s = None if deadline is None else deadline - time.monotonic()
            ended.wait(None if left_s is None else max(0.0, left_s))

    def _too_late(self, running: list[str], timeout_s: float) -> DeadlineError:
        """Returns the error of a join, naming the towers that hang and their steps."""
        now, hanging = time.monotonic(), []
        inside = dict.fromkeys(running, "between steps")
        for one in self._events.open:
            if one.who in inside and one.what == "step":
                for_s = now - one.since_s
                inside[one.who] = f"inside step {one.number} for {for_s:.1f} s"
                if for_s >= timeout_s / 2:
                    hanging.append(one.who)
        told = "".join(f" {name} hangs {inside[name]}." for name in hanging)
        error = DeadlineError(
            f"AsyncRunner.join: {running} still run after {timeout_s} s, with "
            f"{self.steps_done} steps done.{told} Call stop() first if max_steps is "
            "None."
        )
        wait = Wait(
            who="AsyncRunner.join",
            what="the end of all towers",
            waited_s=timeout_s,
            deadline_s=timeout_s,
            arrived=[name for name in self._ended if name not in running],
            missing={
                name: f"{'hangs' if name in hanging else 'runs'} {inside[name]}"
                for name in running
            },
        )
        return add_report(error, wait, self._events)

    def _run(self, k: int, ended: threading.Event) -> None:
        name, events = f"tower{k}", self._events
        events.began(name, "run")
        try:
            while not self._stopping.is_set() and self.steps_done[k] != self._max_steps:
                events.began(name, "step", self.steps_done[k] + 1)
                self._steps[k]()
                self.steps_done[k] += 1
                events.ended(name, "step", self.steps_done[k])
        except (StopIteration, tf.errors.OutOfRangeError):  # out of data
            events.ended(name, "step")
        except BaseException as error:
            self._errors[name] = error
            events.noted("raised", name, type(error).__name__)
            events.ended(name, "step")
            self._stopping.set()
        finally:
            events.ended(name, "run")
            ended.set()


def locked_step(
    compute: Callable[[], Any], apply: Callable[[Any], Any], lock: threading.Lock
) -> Callable[[], None]:
    """Joins two functions into one step; only one tower at a time runs the second.

    For towers in ``tf.function``s that share one optimizer: parallel applies
    lose updates of its state.

    Args:
      compute: returns gradients; towers run it concurrently.
      apply: takes the gradients; one tower at a time runs it.
      lock: the same for all towers.

    Raises:
      TypeError: something that is not a function or a lock.
    """
    check_function(compute=compute)
    check_function(apply=apply)
    if not hasattr(lock, "__enter__"):
        raise TypeError(f"locked_step: lock must be a threading.Lock(); got {lock!r}.")

    def step() -> None:
        grads = compute()
        with lock:
            apply(grads)

    return step
