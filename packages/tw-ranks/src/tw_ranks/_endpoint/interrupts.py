"""Ctrl-C while a rank waits in a collective, which Python by itself does not notice.

SIGTERM is treated as Ctrl-C if a program has given it Python's handler of SIGINT:
background jobs of a script ignore SIGINT, and are ended by SIGTERM.

Python runs signal handlers between bytecodes of its main thread, and a collective
keeps that thread in C++ until it ends. The wakeup descriptor is written to at once, so
a thread that reads it can end the collectives, after which the main thread raises
KeyboardInterrupt. Programs that handle the signals otherwise, or have a wakeup
descriptor, are left alone.
"""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

import tensorflow as tf

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_HEARD_S = 0.1
"""Time in which the main thread runs the handler, unless it is inside C++."""

_LOOKS_S = 0.01

_AGAIN_S = 0.001
"""Delay until a deferred signal is repeated, before the error reaches the program."""

_COMES_S = 1.0
"""Bound on the wait for that signal, in case the thread has stopped watching."""


class InterruptWatch(threading.Thread):
    """A thread that ends collectives when the main thread does not notice Ctrl-C."""

    def __init__(
        self,
        is_inside: Callable[[], bool],
        end: Callable[[str], None],
        *,
        must_defer: Callable[[], bool] = lambda: False,
    ) -> None:
        """Starts the thread if made in the main thread; watches nothing otherwise.

        ``end`` gets the reason why this rank ends its collectives. While
        ``must_defer()``, TensorFlow is calling this process's Python, and would turn a
        KeyboardInterrupt into another error.
        """
        super().__init__(name="tw-ranks-interrupts", daemon=True)
        self._is_inside, self._end, self._must_defer = is_inside, end, must_defer
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._heard = threading.Event()
        self._is_deferred = self._is_owed = self._is_refused = False
        self._taken: tuple[signal.Signals, ...] = ()
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
                heard = [n for n in self._taken if n in numbers and self._handles(n)]
                if heard:
                    self._await_handler(heard[0])
                    with contextlib.suppress(BlockingIOError):  # signals it sent itself
                        self._read.recv(1 << 16, socket.MSG_DONTWAIT)
                    self._heard.clear()

    def hear(self) -> None:
        """Waits for a deferred KeyboardInterrupt, which precedes any other error."""
        is_main = threading.current_thread() is threading.main_thread()
        if self._is_owed and is_main and not self._must_defer():
            self._heard.wait(_COMES_S)

    def close(self) -> None:
        """Stops watching; also in a forked child, whose signals are its own."""
        with contextlib.suppress(ValueError):  # Only the main thread may do so.
            if self._watches:
                found = signal.set_wakeup_fd(-1)
                if found != self._write.fileno():  # Another has replaced ours.
                    signal.set_wakeup_fd(found)
                for number in filter(self._handles, self._taken):
                    signal.signal(number, signal.default_int_handler)
                self._watches = False
            self._write.close()

    def _take_signals(self) -> bool:
        own_handler = signal.default_int_handler
        taken = tuple(n for n in _SIGNALS if signal.getsignal(n) is own_handler)
        if not taken:
            return False
        own = self._write.fileno()
        try:
            before = signal.set_wakeup_fd(own, warn_on_full_buffer=False)
        except ValueError:  # Only the main thread may ask for it.
            return False
        if before != -1:
            signal.set_wakeup_fd(before)
            return False
        self._taken = taken
        for number in taken:
            signal.signal(number, self._note_signal)
        return True

    def _handles(self, number: int) -> bool:
        return signal.getsignal(number) == self._note_signal

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        """Raises KeyboardInterrupt, but not while TensorFlow constructs an error.

        C++ calls the error's class, and turns other exceptions into a RuntimeError.
        """
        if self._must_defer():  # Sent again once its collectives have been ended.
            self._is_refused = self._is_owed = True
            return
        above = frame
        while above is not None:
            if isinstance(above.f_locals.get("self"), tf.errors.OpError):
                self._is_deferred = self._is_owed = True
                return
            above = above.f_back
        self._is_owed = False
        self._heard.set()
        signal.default_int_handler(number, frame)

    def _await_handler(self, number: signal.Signals) -> None:
        has_ended, pause_s, until_s = False, _LOOKS_S, time.monotonic() + _HEARD_S
        while self._watches and not self._heard.wait(pause_s):
            is_late = not has_ended and time.monotonic() >= until_s
            if is_late and not self._is_deferred and self._is_inside():
                has_ended, pause_s = True, _AGAIN_S
                # It writes a report, which the signal must not wait for.
                why = f"was interrupted ({number.name})"
                threading.Thread(target=self._end, args=[why], daemon=True).start()
            elif self._is_deferred or self._is_refused:
                # Once per deferral: the error may already be on its way.
                self._is_deferred = self._is_refused = False
                signal.pthread_kill(threading.main_thread().ident or 0, number)
