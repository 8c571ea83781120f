"""Runs calls that may never return in a thread that can be left behind.

A call that is blocked inside TensorFlow reacts to nothing that Python does. The
caller waits beside it, looks around now and then, and goes away when waiting has
become pointless.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from tw_syncrep._timeouts.server_monitor import LOOK_EVERY_S

T = TypeVar("T")
_Answer = tuple[Any, BaseException | None]


class AbandonedError(RuntimeError):
    """An earlier call was left behind and may still be running."""


class CallThread:
    """One thread that makes one call after the other.

    Attributes:
      is_abandoned: whether a call was left behind; none is possible any more.
      has_ended: whether it was ended; then too.
    """

    def __init__(self, surroundings: AbstractContextManager[Any]) -> None:
        """Starts the thread, in which ``surroundings`` hold."""
        self.is_abandoned = False
        self.has_ended = False
        self._surroundings = surroundings
        # Of the ways to hand something to a thread, this one costs least.
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[_Answer] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._serve, name="tw-syncrep-session", daemon=True
        )
        self._thread.start()

    def run(self, call: Callable[[], T], look: Callable[[], float]) -> T:
        """Makes a call and waits for it.

        Args:
          call: what to do in the thread.
          look: called while that takes long; raises to leave the call behind, or
            returns in how many seconds to look again.

        Returns:
          What ``call`` returned.

        Raises:
          AbandonedError: an earlier call was left behind.
          RuntimeError: the thread has ended.
          BaseException: what ``call`` or ``look`` raised.
        """
        if self.is_abandoned:
            raise AbandonedError(
                "training_session: an earlier call did not return and was left "
                "behind; make a new session."
            )
        if self.has_ended:
            raise RuntimeError(
                "training_session: the session was closed; make a new one."
            )
        self._calls.put(call)
        try:
            result, error = self._await_answer(look)
        except BaseException:
            self.is_abandoned = True
            raise
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def end(self) -> None:
        """Ends the thread, unless a call was left behind in it."""
        if not (self.is_abandoned or self.has_ended):
            self.has_ended = True
            self._calls.put(None)

    def _await_answer(self, look: Callable[[], float]) -> _Answer:
        wait_s = LOOK_EVERY_S
        while True:
            try:
                return self._answers.get(timeout=wait_s)
            except Empty:
                wait_s = look()

    def _serve(self) -> None:
        with self._surroundings:
            while (call := self._calls.get()) is not None:
                self._answers.put(_answer(call))
                del call  # It may hold a session that is to go.


def _answer(call: Callable[[], Any]) -> _Answer:
    try:
        return call(), None
    except BaseException as error:
        return None, error
