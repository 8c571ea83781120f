"""Groups of real processes, each a rank, as tests drive them.

A test names a function of ``rank_programs`` that every rank calls with its group.
"""

import contextlib
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import links
from harness.ports import find_free_ports
from harness.processes import Peer
from harness.tasks import Task
from tw_launch._launcher import pmi as _pmi

DEADLINE_S = 200  # of one call; a busy machine takes a minute for some
ENGINE = "TW_TEST_ENGINE"
"""Variable by which all tests of ranks run over another engine: "mpi"."""


class Raised(Exception):
    """What a rank's function raised, when (``time.monotonic``), and its report."""

    def __init__(
        self,
        kind: str,
        text: str,
        missing: list[int] | None,
        at_s: float,
        report: str = "",
    ) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text, self.missing, self.at_s = kind, text, missing, at_s
        self.report = report


class RankProcess(Peer):
    """One rank's process."""

    def __init__(
        self, context: Any, rank: int, joining: dict[str, Any], run: Any
    ) -> None:
        super().__init__(context, f"rank {rank}", run, joining)
        self.rank = rank

    def hear(self, within_s: float | None = None) -> Any:
        """Returns what the function returned; raises what it raised."""
        word, value = super().hear(DEADLINE_S if within_s is None else within_s)
        if word == "raised":
            raise Raised(*value)
        return value


class Ranks:
    """A group of ranks on this machine.

    Those in ``absent`` do not come before ``come``. ``machines`` are what ranks take
    for theirs, by rank; where they are ``linked``, each is a network namespace whose
    link ``cut`` takes down. The ``engine`` is by default "tensorflow" or that of
    ``ENGINE``. Other options are those of ``run``, by rank where they are dictionaries
    of ranks.
    """

    def __init__(
        self,
        context: Any,
        size: int,
        *,
        address: str | None = None,
        absent: Sequence[int] = (),
        machines: Sequence[int] = (),
        linked: bool = False,
        run: Any = None,
        engine: str = "",
        **options: Any,
    ) -> None:
        if engine:
            options["engine"] = engine
        engine = engine or os.environ.get(ENGINE, "")
        self._mpi = _pmi.PmiTable(size) if engine == "mpi" and not linked else None
        if (
            run is None
        ):  # imported late: reading the options of drills takes no TensorFlow
            from harness.rank_programs import run_rank as run
        self._context, self._options = context, options
        self._size, self._machines, self._run = size, machines, run
        self._hosts: list[str] = []
        self._hub: Task | None = None
        self._shared: set[Path] = set()
        self.all: list[RankProcess] = []  # the ranks that have come
        self.has_ended = False
        if linked:
            self._hosts = links.task_addresses(len(set(machines)))
            self._hub = Task(context, "hub", "hub", {}, {})
            self._hub.expect("bridged")
            address = self._hosts[0]
        # The coordinator's
        self.address = address or f"127.0.0.1:{find_free_ports(1)[0]}"
        for rank in range(size):
            if rank not in absent:
                self.come(rank)

    def come(self, rank: int) -> RankProcess:
        """Starts a rank's process."""
        place: dict[str, Any] = {"coordinator": self.address, "rank": rank}
        place["size"] = self._size
        first = None
        if self._machines:
            place["machine"] = machine = self._machines[rank]
            others = [r for r in self.all if self._machines[r.rank] == machine]
            first = others[0] if others else None
        if self._hub is not None:
            leader = None if first is None else first.process.pid
            place["network"] = (leader, self._hosts[machine], self._hosts)
        if self._mpi is not None:
            place["mpi"] = self._mpi.variables(rank)
        joining = {**place, **self._options}
        process = RankProcess(self._context, rank, joining, self._run)
        self.all.append(process)
        if self._hub is not None:
            if first is None:
                process.hear()  # It is in a namespace of its own.
                self._hub.ask("plug", (f"plug{machine}", process.process.pid))
                process.say("plugged")
            process.hear()
        return process

    def cut(self, machine: int) -> None:
        """Takes a machine's link down: what is sent vanishes."""
        assert self._hub is not None
        self._hub.ask("down", f"plug{machine}")

    def joined(self) -> "Ranks":
        """Waits until all have joined."""
        for rank in self.all:
            rank.hear()
            self._shared |= _shared_memory(rank)
        return self

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Has every rank call a function; returns what each returned."""
        return self.call_each(name, [arguments] * len(self.all))

    def call_each(self, name: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """As ``call``, with arguments of their own."""
        for rank, own in zip(self.all, arguments, strict=True):
            rank.say(name, *own)
        results: list[Any] = []
        for rank in self.all:  # Of all, so that nothing is left for the next call.
            try:
                results.append(rank.hear())
            except Raised as error:
                results.append(error)
            except (EOFError, TimeoutError):
                self._abort()  # or the next call would take the late answer
                raise
        for result in results:
            if isinstance(result, Raised):
                raise result
        return results

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def _abort(self) -> None:
        """Ends ranks of which one does not answer; they print their stacks."""
        for rank in self.all:
            if rank.process.is_alive():
                rank.send(signal.SIGABRT)
        for rank in self.all:
            rank.process.join(10)
        self.end()

    def end(self) -> None:
        self.has_ended = True
        try:
            for rank in self.all:
                rank.kill()
        finally:
            if self._mpi is not None:
                self._mpi.close()
            for path in self._shared:  # MPICH leaves it where ranks are killed.
                path.unlink(missing_ok=True)
            if self._hub is not None:
                self._hub.kill()


def _shared_memory(rank: RankProcess) -> set[Path]:
    """Returns the files of shared memory of a rank's MPI."""
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{rank.process.pid}/maps").read_text()
        return {Path(name) for name in re.findall(r"/dev/shm/mpich\S+", maps)}
    return set()
