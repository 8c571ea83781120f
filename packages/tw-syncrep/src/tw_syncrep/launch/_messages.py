"""What launchers tell each other: JSON objects, one a line, read into dataclasses.

They hold text, whole numbers, and lists and tables of these, nothing that is run: each
machine runs its own command line.
"""

import json
from dataclasses import asdict, dataclass
from signal import SIGHUP, SIGINT, SIGTERM
from typing import get_args

from tw_syncrep.cluster._channel import parse_line, read_as

MAX_BYTES = 1 << 20  # a cluster of 20,000 tasks is smaller
SIGNALS = (SIGINT, SIGTERM, SIGHUP)


@dataclass(frozen=True)
class Hello:
    """A launcher has come to the meeting.

    Attributes:
      node: its rank.
      host: where the tasks of other machines reach its own.
      workers: how many it will run.
      ports: free ones, one for each of its servers and workers.
      settings: versions and options by name, which must be the same everywhere.
    """

    node: int
    host: str
    workers: int
    ports: tuple[int, ...]
    settings: dict[str, str]


@dataclass(frozen=True)
class Start:
    """Start all tasks.

    Attributes:
      number: of this start of all tasks, from 0.
      cluster: "host:port" of the tasks of each job.
      first_worker: index of the machine's first worker.
      run: drawn by node 0, so that tasks of two runs know each other apart.
    """

    number: int
    cluster: dict[str, tuple[str, ...]]
    first_worker: int
    run: str


@dataclass(frozen=True)
class Restart:
    """Start one task, which has failed, again."""

    task: str
    said: str


@dataclass(frozen=True)
class Stop:
    """End all tasks and answer with ``Idle``; they will be started again."""

    said: str


@dataclass(frozen=True)
class Ended:
    """A task has ended.

    Attributes:
      task: its name, as "worker 1".
      status: as a shell reports it, 0 to 255.
      signal: name of the one that ended it; empty if none did.
      lines: the last of its output, where it failed.
      log: path of its log file; empty if there is none.
    """

    task: str
    status: int
    signal: str = ""
    lines: tuple[str, ...] = ()
    log: str = ""

    @property
    def how(self) -> str:
        """As a person wants to read it."""
        return self.signal or f"exit code {self.status}"


@dataclass(frozen=True)
class Idle:
    """All tasks have been ended as told; these ports are free for the next start."""

    ports: tuple[int, ...]


@dataclass(frozen=True)
class Signalled:
    """A launcher was sent a signal."""

    number: int


@dataclass(frozen=True)
class Over:
    """The run is over, or there will be none.

    Attributes:
      status: of all launchers.
      said: why; empty where the workers have ended well.
      signal: what the tasks are asked to end with.
      failed: the first task that failed, where that was why.
      where: its machine; empty where there is only one.
    """

    status: int
    said: str = ""
    signal: int = SIGTERM
    failed: Ended | None = None
    where: str = ""


@dataclass(frozen=True)
class Beat:
    """The launcher is there."""


Message = Hello | Start | Restart | Stop | Ended | Idle | Signalled | Over | Beat
_KINDS = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Writes a message as a line."""
    return json.dumps([type(message).__name__, asdict(message)]).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Reads a line.

    Raises:
      ValueError: it is no message, or one with wrong fields.
    """
    try:
        kind, fields = parse_line(line)
        message: Message = read_as(_KINDS[kind], fields)
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"what came is no message: {line[:60]!r}") from None
    return message
