"""Output of a launcher and its tasks: prefixed lines, log files, the last lines."""

import contextlib
import errno
import os
import re
import stat
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TextIO

_LAST_LINES = 20
_WARNING = "ExposedServerWarning: "  # and the line of source that Python shows with it
_LINE_CHARACTERS = 500
_NOT_A_FILE = "it is a link or no plain file, and logs follow no link"
_READ_BYTES = 1 << 16
_LINE_BYTES = 1 << 24  # longer lines are passed on in pieces
# After a newline, and after the carriage return that ends a state of a progress bar.
_ENDS = re.compile(rb"(?<=\n)|(?<=\r)(?!\n)")
# For stdout and stderr: long texts that two threads write at once would mix.
_SAYING = (threading.Lock(), threading.Lock())


class TaskOutput:
    """Passes on a task's output until the task and its children have closed it."""

    def __init__(
        self, name: str, out: IO[bytes] | None, err: IO[bytes] | None, log: Path | None
    ) -> None:
        """Copies ``out`` to stdout, ``err`` to stderr, both to ``log``, in threads."""
        self._name, self._path = name, log
        self._last: deque[str] = deque(maxlen=_LAST_LINES + 4)
        self._logging, self._num_open = threading.Lock(), 2
        self._log: IO[bytes] | None = None
        if log is not None:
            with self._ending_log():
                self._log = _open_log(log)
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((out, sys.stdout), (err, sys.stderr))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines of both streams, truncated to a readable length.

        Without the warning of an open server, which does not explain a failure.
        """
        lines = list(self._last)
        for at in [n for n, line in enumerate(lines) if _WARNING in line][::-1]:
            source = "".join(lines[at + 1 : at + 2])
            del lines[at : at + 1 + source.startswith("  ")]
        return tuple(line[:_LINE_CHARACTERS] for line in lines[-_LAST_LINES:])

    def wait(self, timeout_s: float) -> None:
        """Waits until all output is passed on.

        That never happens while a process that left the task's group holds it open.
        """
        for reader in self._readers:
            reader.join(timeout_s)

    def _read(self, theirs: IO[bytes] | None, ours: TextIO | None) -> None:
        before, shown = b"\n", ""
        for line in _lines(theirs):
            text = line.decode(errors="replace")
            with self._ending_log():
                if self._log is not None:
                    self._log.write(line)
            if before.endswith(b"\r") and line == b"\n":  # It was read in two pieces.
                say(ours, text)
            else:
                # A state of a progress bar is overwritten by the next one.
                if before.endswith(b"\r") and self._last and self._last[-1] is shown:
                    self._last.pop()
                shown = text.rstrip("\r\n")
                self._last.append(shown)
                say(ours, f"[{self._name}] {text}")
            before = line
        with self._ending_log():
            self._num_open -= 1
            if self._log is not None and not self._num_open:
                self._log.close()

    @contextlib.contextmanager
    def _ending_log(self) -> Iterator[None]:
        """Scope of one thread's use of the log; an error ends the log, nothing else."""
        with self._logging:
            try:
                yield
            except OSError as error:
                announce(f"{self._path}: {error.strerror}; this log ends here")
                if self._log is not None:
                    self._log.close()
                    self._log = None


def _open_log(path: Path) -> IO[bytes]:
    """Opens an empty file, and no link, which another user may have put there."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        log = os.fdopen(os.open(path, flags, 0o666), "wb", buffering=0)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):  # EMLINK: on FreeBSD
            raise OSError(error.errno, _NOT_A_FILE) from None
        raise
    found = os.fstat(log.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        log.close()
        raise OSError(errno.EEXIST, _NOT_A_FILE)
    log.truncate()
    return log


def check_log_folder(folder: Path) -> None:
    """Makes a folder for log files, and checks that it is writable, and no link."""
    if folder.is_symlink():
        raise OSError(
            f"--log-dir {folder} is a link, which another user may have made; pass "
            f"the folder that it leads to, {folder.resolve()}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"--log-dir {folder}: cannot write there ({error.strerror}); pass a folder "
            "that can be written"
        ) from None


def say(stream: TextIO | None, text: str) -> None:
    """Writes as much as it can to a stream that may be closed or not Unicode.

    If nothing reads it any more, as after ``| head``, the text is dropped: a task whose
    output is not read would block forever.
    """
    if stream is None:  # Python was started without it.
        return
    encoding = stream.encoding or "utf-8"
    try:
        with _SAYING[stream is sys.stderr]:
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
    except BrokenPipeError:  # Flushing the rest at exit would fail.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass


def announce(text: str) -> None:
    """Prints a message of the launcher itself, unless the text is empty."""
    if text:
        say(sys.stderr, f"[tw-launch] {text}\n")


def _lines(stream: IO[bytes] | None) -> Iterator[bytes]:
    """Reads lines and states of progress bars, each as soon as it has its end.

    The last line gets a newline if it has none.
    """
    held = bytearray()
    while stream is not None and (read := stream.read1(_READ_BYTES)):  # type: ignore[attr-defined]
        for piece in filter(None, _ENDS.split(read)):
            held += piece
            if piece[-1:] in b"\r\n" or len(held) >= _LINE_BYTES:
                yield bytes(held)
                held.clear()
    if held:
        yield bytes(held) + b"\n"
