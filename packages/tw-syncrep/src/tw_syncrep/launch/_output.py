"""Output of a launcher and its tasks: prefixed lines, log files, the last lines."""

import contextlib
import os
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TextIO

_LAST_LINES = 20
_LINE_CHARACTERS = 500
_LINE_BYTES = 1 << 16  # longer ones, as of a progress bar, are passed on in pieces


class TaskOutput:
    """Passes on a task's output until the task and its children have closed it."""

    def __init__(
        self, name: str, out: IO[bytes] | None, err: IO[bytes] | None, log: Path | None
    ) -> None:
        """Copies ``out`` to stdout, ``err`` to stderr, both to ``log``, in threads."""
        self._name = name
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._log = None if log is None else _Log(log, users=2)
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((out, sys.stdout), (err, sys.stderr))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines of both streams, truncated to a readable length."""
        return tuple(line[:_LINE_CHARACTERS] for line in list(self._last))

    def wait(self, timeout_s: float) -> bool:
        """Waits until all output is passed on; returns whether it is.

        It never is while a process that left the task's group keeps the output open.
        """
        for reader in self._readers:
            reader.join(timeout_s)
        return not any(reader.is_alive() for reader in self._readers)

    def _read(self, theirs: IO[bytes] | None, ours: TextIO | None) -> None:
        for line in _lines(theirs):
            text = line.decode(errors="replace").rstrip("\n")
            self._last.append(text)
            if self._log is not None:
                self._log.write(line)
            say(ours, f"[{self._name}] {text}\n")
        if self._log is not None:
            self._log.close()


class _Log:
    """A log file that threads share; a write error ends the log and nothing else."""

    def __init__(self, path: Path, *, users: int) -> None:
        """Empties the file, which is closed once ``users`` threads have closed it."""
        self._path, self._users = path, users
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        with self._giving_up():
            self._file = path.open("wb", buffering=0)

    def write(self, line: bytes) -> None:
        with self._lock, self._giving_up():
            if self._file is not None:
                self._file.write(line)

    def close(self) -> None:
        with self._lock, self._giving_up():
            self._users -= 1
            if self._file is not None and not self._users:
                self._file.close()

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            announce(f"{self._path}: {error.strerror}; this log ends here")
            self._file = None


def check_log_folder(folder: Path) -> None:
    """Makes a folder for log files, and checks that it is writable."""
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

    If nobody reads any more, as after ``| head``, the text is dropped: a task whose
    output is not read would block forever.
    """
    if stream is None:  # Python was started without it.
        return
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        _discard(stream)
    except (OSError, ValueError):
        pass


def announce(text: str) -> None:
    """Prints a message of the launcher itself, unless the text is empty."""
    if text:
        say(sys.stderr, f"[tw-launch] {text}\n")


def _lines(stream: IO[bytes] | None) -> Iterator[bytes]:
    """Reads lines, ending each with a newline even if the last has none."""
    while stream is not None and (line := stream.readline(_LINE_BYTES)):
        is_whole = line.endswith(b"\n") or len(line) == _LINE_BYTES
        yield line if is_whole else line + b"\n"


def _discard(stream: TextIO) -> None:
    """Redirects a stream to devnull; flushing the rest at exit would fail otherwise."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
