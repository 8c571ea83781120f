"""Groups of real processes, each a rank, as tests drive them.

A test names a function of ``rank_programs`` that every rank calls with its group.
"""

import os
import signal
from collections.abc import Sequence
from typing import Any

import rank_programs

from tw_syncrep.cluster._network_exposure import find_free_ports

DEADLINE_S = 60


class Raised(Exception):
    """What a rank's function raised: ``kind``, ``text``, and ``missing`` ranks."""

    def __init__(self, kind: str, text: str, missing: list[int] | None) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text, self.missing = kind, text, missing


class RankProcess:
    """One rank's process, and the test's end of its pipe."""

    def __init__(self, context: Any, rank: int, joining: dict[str, Any]) -> None:
        self.rank = rank
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=rank_programs.run_rank, args=(theirs, joining), daemon=True
        )
        self.process.start()
        theirs.close()

    def say(self, name: str, *arguments: Any) -> None:
        self.pipe.send((name, arguments))

    def hear(self, within_s: float = DEADLINE_S) -> Any:
        """Returns what the function returned; raises what it raised."""
        if not self.pipe.poll(within_s):
            raise TimeoutError(f"rank {self.rank} said nothing for {within_s} s")
        word, value = self.pipe.recv()
        if word == "raised":
            raise Raised(*value)
        return value

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        if self.process.is_alive():
            self.send(signal.SIGCONT)
            self.process.kill()
        self.process.join(10)
        assert not self.process.is_alive()


class Ranks:
    """A group of ranks on this machine.

    Those in ``absent`` do not come before ``come``; other options are those of
    ``rank_programs.run_rank``, by rank where they are dictionaries of ranks.
    """

    def __init__(
        self,
        context: Any,
        size: int,
        *,
        address: str | None = None,
        absent: Sequence[int] = (),
        **options: Any,
    ) -> None:
        self._context, self._options = context, options
        self._size = size
        self._address = address or f"127.0.0.1:{find_free_ports(1)[0]}"
        self.all: list[RankProcess] = []
        for rank in range(size):
            if rank not in absent:
                self.come(rank)

    def come(self, rank: int) -> RankProcess:
        """Starts a rank's process."""
        place = {"coordinator": self._address, "rank": rank, "size": self._size}
        process = RankProcess(self._context, rank, {**place, **self._options})
        self.all.append(process)
        return process

    def joined(self) -> "Ranks":
        """Waits until all have joined."""
        for rank in self.all:
            rank.hear()
        return self

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Has every rank call a function; returns what each returned."""
        return self.call_each(name, [arguments] * len(self.all))

    def call_each(self, name: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """As ``call``, with arguments of their own."""
        for rank, own in zip(self.all, arguments, strict=True):
            rank.say(name, *own)
        return [rank.hear() for rank in self.all]

    def end(self) -> None:
        for rank in self.all:
            rank.end()
