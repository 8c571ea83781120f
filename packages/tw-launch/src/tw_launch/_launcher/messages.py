"""Messages between launchers: one JSON value per line, read into dataclasses.

They hold strings, integers, and lists and dicts of these, nothing executable: each
machine runs its own command line.
"""

import json
from dataclasses import asdict, dataclass, is_dataclass, replace
from signal import SIGHUP, SIGINT, SIGTERM
from typing import Any, get_args

from tw_launch._channel import parse_line, read_as, write_printable

MAX_BYTES = 1 << 20  # enough for a cluster of 20,000 tasks
SIGNALS = (SIGINT, SIGTERM, SIGHUP)


@dataclass(frozen=True)
class Hello:
    """A launcher joins the run."""

    node: int  # its rank
    host: str  # where other machines reach its tasks
    workers: int
    ports: tuple[int, ...]  # free ones for its servers, then its workers
    settings: dict[str, str]  # versions and options, the same on all machines


@dataclass(frozen=True)
class Start:
    """Orders all tasks to be started."""

    number: int  # of this start of all tasks, from 0
    cluster: dict[str, tuple[str, ...]]
    first_worker: int  # index of the machine's first worker
    run: str  # random ID, so that tasks of two runs can be told apart


@dataclass(frozen=True)
class Restart:
    """Orders a failed task to be started again."""

    task: str
    said: str


@dataclass(frozen=True)
class Stop:
    """Orders all tasks to be ended, to be started again; the answer is ``Idle``."""

    said: str


@dataclass(frozen=True)
class Ended:
    """A task has ended."""

    task: str
    status: int  # as a shell reports it, 0 to 255
    signal: str = ""  # name of the one that ended it; empty if none did
    lines: tuple[str, ...] = ()  # the last of its output, if it failed
    log: str = ""  # path of its log file; empty if there is none

    @property
    def how(self) -> str:
        """The signal or exit code, for display."""
        return self.signal or f"exit code {self.status}"


@dataclass(frozen=True)
class Idle:
    """All tasks have been ended as ordered; these ports are free for the next start."""

    ports: tuple[int, ...]


@dataclass(frozen=True)
class Signalled:
    """A launcher received a signal."""

    number: int


@dataclass(frozen=True)
class Over:
    """The run is over, or will not start."""

    status: int  # exit status of all launchers
    said: str = ""  # why; empty if the workers ended well
    signal: int = SIGTERM  # asks the tasks to end
    failed: Ended | None = None  # the first task that failed, if that was why
    where: str = ""  # its machine; empty if there is only one
    last: Ended | None = None  # the failure that ended a run that had gone on before


@dataclass(frozen=True)
class Beat:
    """A heartbeat: the launcher is alive."""


Message = Hello | Start | Restart | Stop | Ended | Idle | Signalled | Over | Beat
_KINDS = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Encodes a message as a line."""
    return json.dumps([type(message).__name__, asdict(message)]).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Decodes a line; raises ValueError if it is not a message.

    Texts for the terminal are escaped, but for the lines of tasks' own output.
    """
    try:
        kind, fields = parse_line(line)
        message: Message = read_as(_KINDS[kind], fields)
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"expected a message, got {line[:60]!r}") from None
    # A greeting is checked instead: its host is for others to connect to.
    escaped: Message = message if isinstance(message, Hello) else _escape(message)
    return escaped


def _escape(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{n: _escape(one) for n, one in vars(value).items()})
    return write_printable(value, MAX_BYTES) if isinstance(value, str) else value
