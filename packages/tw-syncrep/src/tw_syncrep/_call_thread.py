"""Runs calls that may never return in a thread that can be left behind.

A call that is blocked inside TensorFlow reacts to nothing that Python does. The
caller waits beside it, looks around now and then, and goes away when waiting has
become pointless.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

T = TypeVar("T")
LOOK_EVERY_S = 0.5
"""Seconds between two looks at a call that takes long."""


class AbandonedError(RuntimeError):
    """An earlier call was left behind and may still be running."""


class CallThread:
    """One thread that makes one call after the other.

    Attributes:
      is_abandoned: whether a call was left behind; none is possible any more.
    """

    def __init__(self, surroundings: AbstractContextManager[Any]) -> None:
        """Starts the thread, in which ``surroundings`` hold."""
        self.is_abandoned = False
        self._surroundings = surroundings
        self._call: Callable[[], Any] | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._begin = threading.Semaphore(0)
        self._ended = threading.Lock()
        self._ended.acquire()
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
          BaseException: what ``call`` or ``look`` raised.
        """
        if self.is_abandoned:
            raise AbandonedError(
                "training_session: an earlier call did not return and was left "
                "behind; make a new session."
            )
        self._call = call
        self._begin.release()
        wait_s = LOOK_EVERY_S
        try:
            while not self._ended.acquire(timeout=wait_s):
                wait_s = look()
        except BaseException:
            self.is_abandoned = True
            raise
        error, self._error = self._error, None
        result, self._result = self._result, None
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def end(self) -> None:
        """Ends the thread, unless a call was left behind in it."""
        if not self.is_abandoned:
            self.is_abandoned = True
            self._call = None
            self._begin.release()

    def _serve(self) -> None:
        with self._surroundings:
            while True:
                self._begin.acquire()
                if self._call is None:
                    return
                try:
                    self._result = self._call()
                except BaseException as error:
                    self._error = error
                self._call = None
                self._ended.release()
