"""Ctrl-C while a rank waits in a collective, which Python does not hear of by itself.

Python runs handlers of signals between bytecodes of its main thread, and a collective
keeps that thread in C++ until it ends. The wakeup descriptor is written to at once, so
a thread that reads it can end the collectives, after which the main thread raises
KeyboardInterrupt. Programs that handle the signal, or have a wakeup descriptor, are
left alone.
"""

import contextlib
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

import tensorflow as tf

_HEARD_S = 0.1
"""In so long the main thread runs the handler, unless it is inside of C++."""

_AGAIN_S = 0.001
"""Until a deferred signal comes again, before the error reaches the program."""

_COMES_S = 1.0
"""It does come; this is for a thread that watches no more."""


class InterruptWatch(threading.Thread):
    """A thread that ends collectives where the main thread does not hear of SIGINT."""

    def __init__(self, is_inside: Callable[[], bool], end: Callable[[], None]) -> None:
        """Starts, in the main thread; watches nothing elsewhere.

        Args:
          is_inside: whether this process is inside a collective.
          end: ends all collectives of this process.
        """
        super().__init__(name="tw-syncrep-interrupts", daemon=True)
        self._is_inside, self._end = is_inside, end
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._heard = threading.Event()
        self._is_deferred = self._is_owed = False
        self._watches = self._take_signals()
        if self._watches:
            self.start()
        else:
            self._read.close()
            self._write.close()

    def run(self) -> None:
        """Waits for signals."""
        with self._read:
            while numbers := self._read.recv(1 << 16):
                if signal.SIGINT in numbers and self._handles():
                    self._await_handler()
                    with contextlib.suppress(BlockingIOError):  # What it sent itself.
                        self._read.recv(1 << 16, socket.MSG_DONTWAIT)
                    self._heard.clear()

    def hear(self) -> None:
        """Waits for a deferred KeyboardInterrupt, which comes before another error."""
        if self._is_owed and threading.current_thread() is threading.main_thread():
            self._heard.wait(_COMES_S)

    def close(self) -> None:
        """Watches no more; in a forked child too, whose signals are its own."""
        with contextlib.suppress(ValueError):  # Only the main thread may do so.
            if self._watches:
                found = signal.set_wakeup_fd(-1)
                if found != self._write.fileno():  # Somebody has taken our place.
                    signal.set_wakeup_fd(found)
                if self._handles():
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                self._watches = False
            self._write.close()

    def _take_signals(self) -> bool:
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return False
        own = self._write.fileno()
        try:
            before = signal.set_wakeup_fd(own, warn_on_full_buffer=False)
        except ValueError:  # Only the main thread may ask for it.
            return False
        if before != -1:
            signal.set_wakeup_fd(before)
            return False
        signal.signal(signal.SIGINT, self._handle)
        return True

    def _handles(self) -> bool:
        return signal.getsignal(signal.SIGINT) == self._handle

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Raises KeyboardInterrupt, but not out of an error that TensorFlow makes.

        C++ calls the error's class, and makes a RuntimeError of what else comes of it.
        """
        above = frame
        while above is not None:
            if isinstance(above.f_locals.get("self"), tf.errors.OpError):
                self._is_deferred = self._is_owed = True
                return
            above = above.f_back
        self._is_owed = False
        self._heard.set()
        signal.default_int_handler(number, frame)

    def _await_handler(self) -> None:
        has_ended, pause_s = False, _HEARD_S
        while self._watches and not self._heard.wait(pause_s):
            if self._is_deferred:  # Once for each time: it may be raised just now.
                self._is_deferred = False
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            elif not has_ended and self._is_inside():
                has_ended, pause_s = True, _AGAIN_S
                # It writes a report, for which the signal is not to wait.
                threading.Thread(target=self._end, daemon=True).start()
