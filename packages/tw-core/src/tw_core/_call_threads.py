"""Calls in a separate thread, which the caller can abandon.

Python cannot interrupt a call inside TensorFlow. So a call that may hang is made in
another thread; the caller waits for the answer in Python, checks from time to time
whether waiting still makes sense, and abandons the call if not.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

_T = TypeVar("_T")
_Calls = SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None]


class CallThread:
    """A thread that makes one call after the other.

    Attributes:
      is_abandoned: whether a call was abandoned; the thread makes no more calls.
      has_ended: whether ``end`` was called.
    """

    def __init__(
        self, name: str, *, surroundings: AbstractContextManager[Any] | None = None
    ) -> None:
        """Starts the thread, which ends with this object or the process.

        Args:
          name: the thread's name.
          surroundings: a context that the thread enters first.

        Raises:
          TypeError: ``name`` is not a string, or empty.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"CallThread: name must be a string; got {name!r}.")
        self.is_abandoned = self.has_ended = False
        self._calls: _Calls = SimpleQueue()  # the cheapest way to a thread
        threading.Thread(
            target=_serve,
            args=(self._calls, surroundings or nullcontext()),
            name=name,
            daemon=True,
        ).start()
        weakref.finalize(self, self._calls.put, None)

    def run(
        self, call: Callable[[], _T], check: Callable[[], float], *, after_s: float
    ) -> _T:
        """Makes a call in the thread, and waits for its result.

        Args:
          call: takes no arguments.
          check: called after ``after_s``; raises to abandon the call, or returns the
            seconds until its next call.
          after_s: seconds.

        Returns:
          The call's result.

        Raises:
          RuntimeError: an earlier call was left behind, or the thread was ended.
          TypeError: ``call`` or ``check`` is not a function.
          Exception: any that ``call`` or ``check`` raises.
        """
        _refuse_others("run", call=call, check=check)
        wait_s = after_s
        answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._put(call, answers.put)
        try:
            while (answer := _within(answers, wait_s)) is None:
                wait_s = check()
        except BaseException:  # Ctrl-C too
            self.is_abandoned = True
            self._calls.put(None)  # The thread ends once the call returns.
            raise
        result, error = answer
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def submit(self, call: Callable[[], _T]) -> "Future[_T]":
        """Makes a call in the thread, after those before it; does not wait.

        Raises:
          RuntimeError: an earlier call was left behind, or the thread was ended.
          TypeError: ``call`` is not a function.
        """
        _refuse_others("submit", call=call)
        future: Future[_T] = Future()

        def answer(answer: tuple[Any, BaseException | None]) -> None:
            result, error = answer
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self._put(call, answer)
        return future

    def end(self) -> None:
        """Ends the thread after the calls so far, unless one was abandoned."""
        if not (self.is_abandoned or self.has_ended):
            self.has_ended = True
            self._calls.put(None)

    def _put(self, call: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        if self.is_abandoned or self.has_ended:
            why = "an earlier call was abandoned" if self.is_abandoned else "it ended"
            raise RuntimeError(f"CallThread: takes no more calls: {why}; make another.")
        self._calls.put((call, answer))


def _refuse_others(method: str, **given: object) -> None:
    for name, value in given.items():
        if not callable(value):
            raise TypeError(
                f"CallThread.{method}: {name} must be a function; got {value!r}."
            )


def _within(answers: "SimpleQueue[_T]", wait_s: float) -> _T | None:
    try:
        return answers.get(timeout=wait_s)
    except Empty:
        return None


def _serve(calls: _Calls, surroundings: AbstractContextManager[Any]) -> None:
    # Not a method: the thread must not keep its object alive.
    with surroundings:
        while (asked := calls.get()) is not None:
            call, answer = asked
            done: tuple[Any, BaseException | None]
            try:
                done = call(), None
            except BaseException as error:
                done = None, error
            answer(done)
            # These may keep a session or an error alive.
            del asked, call, answer, done
