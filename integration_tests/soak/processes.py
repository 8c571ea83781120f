"""Starting, watching and ending the processes of a soak (Linux)."""

import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

from soak.trend import Sample

PROC = Path("/proc")
TAG = "TOWERS_SOAK"
_PR_SET_PDEATHSIG = 1


class Program:
    """A process that ends with this one, and whose lines a thread keeps."""

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        """Starts it, in a group of its own: Ctrl-C reaches this process alone."""
        libc = ctypes.CDLL(None)
        self._process = subprocess.Popen(
            list(command),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    def new_lines(self) -> Iterator[str]:
        """Yields what it has printed since the last call."""
        while True:
            try:
                yield self._lines.get_nowait()
            except Empty:
                return

    def wait(self, timeout_s: float) -> int | None:
        """Waits for its end; None if that does not come."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(5.0)
        return status

    def end(self, grace_s: float) -> None:
        """Asks it to end, then makes it."""
        if self.status is None:
            self._process.send_signal(signal.SIGINT)
        if self.wait(grace_s) is None:
            self._process.kill()
            self.wait(grace_s)

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line.rstrip("\n"))


def sample(pid: int, at_s: float) -> Sample | None:
    """Reads what a process holds; None where it is gone."""
    try:
        pages = int((PROC / str(pid) / "statm").read_text().split()[1])
        descriptors = len(os.listdir(PROC / str(pid) / "fd"))
    except (OSError, IndexError):
        return None
    if not pages:  # It has ended, and nobody has asked how.
        return None
    return Sample(at_s, pages * os.sysconf("SC_PAGE_SIZE"), descriptors)


def tagged(tag: str) -> list[int]:
    """Lists the processes whose environment holds the tag, which children inherit."""
    wanted, found = f"{TAG}={tag}".encode(), []
    for entry in PROC.iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue  # It has ended, or is another user's.
    return found
