"""Makes the workers of one machine one MPI world, over PMI-1, as MPICH's launchers do.

An MPI process asks its launcher for its rank, puts its address into a table, waits
until all have, and reads the others'. That is all that ``mpiexec`` does for MPI beyond
starting processes, which ``tw-launch`` does itself: so each worker's output, end and
restarts are those of any other task. MPICH, Intel MPI and MVAPICH speak PMI-1.
"""

import contextlib
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable

from tw_launch._channel import LineSocket
from tw_launch._launcher.output import announce
from tw_launch._reception import Peer, Reception, Refusal, Refusals

_LIMITS = {"kvsname_max": 64, "keylen_max": 64, "vallen_max": 1024}
_MOST_KEYS = 256  # of a rank; MPICH puts a few
_LINE_BYTES = 1 << 12
_IDS = 1 << 31  # MPICH reads its id as an int.
_POLL_S = 0.25
_SEND_S = 1.0
_LOOPBACK = "lo"  # On Linux; UCX runs nowhere else.
# Also names who refuses, for a client that prints it.
_REFUSED = "refused rc=1 msg=tw_launch_does_not_know_this_process"

Asked = dict[str, str]


class PmiTable:
    """The table of one start of all workers, served until ``close``."""

    def __init__(self, size: int) -> None:
        """Begins to listen, only for processes of this machine."""
        self._size = size
        # MPICH names a file of shared memory after it, which a killed run leaves there.
        self._name = f"tw_launch_{secrets.token_hex(8)}"
        # All ranks are on one node, so that they share memory.
        mapping = f"(vector,(0,1,{size}))"
        # A value and the rank that has put it, the only one that may put it again.
        self._table: dict[str, tuple[str, int]] = {"PMI_process_mapping": (mapping, -1)}
        self._waiting: set[int] = set()
        self._lines: dict[int, LineSocket] = {}  # of ranks that are connected
        # By its id, which others do not know, the table recognizes a rank.
        self._ids: dict[int, int] = {}
        while len(self._ids) < size:
            self._ids.setdefault(secrets.randbelow(_IDS), len(self._ids))
        listener = socket.create_server(("127.0.0.1", 0))
        self._address = listener.getsockname()
        self._reception = Reception(
            listener,
            self._admit,
            door="MPI's table",
            key=None,  # MPICH cannot compute an HMAC.
            refusals=Refusals(lambda why: announce(f"MPI's table refused: {why}")),
            answer=_write(_REFUSED),
        )
        self._selector = selectors.DefaultSelector()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def variables(self, rank: int) -> dict[str, str]:
        """Returns the environment by which a worker finds its place."""
        host, port = self._address
        [own_id] = [number for number, one in self._ids.items() if one == rank]
        return {
            "PMI_PORT": f"{host}:{port}",
            "PMI_ID": str(own_id),
            "PMI_RANK": str(rank),
            "PMI_SIZE": str(self._size),
            "MPI_LOCALRANKID": str(rank),
            "MPI_LOCALNRANKS": str(self._size),
        } | _find_network()

    def close(self) -> None:
        """Accepts no more workers."""
        self._is_closed.set()
        self._reception.wake()
        self._thread.join(2 * _SEND_S)

    def _serve(self) -> None:
        with self._selector:
            self._selector.register(self._reception, selectors.EVENT_READ)
            while not self._is_closed.is_set():
                ready = self._selector.select(_POLL_S)
                self._reception.receive()
                for key, _ in ready:
                    if key.fileobj is not self._reception:
                        self._read(key.data)
            self._reception.close()
            for line in self._lines.values():
                line.close()

    def _admit(self, peer: Peer, lines: list[bytes]) -> bool:
        """Recognizes a worker by its first line; answers others that it does not."""
        asked = _parse(lines[0])
        if asked.get("cmd") != "initack":
            self._reception.refuse_lines(peer, "it is not a worker of this run", lines)
            return False
        rank = self._ids.get(int(asked.get("pmiid", "-1")))
        if rank is None:
            raise Refusal("it has no id of a worker of this run")
        # An earlier process of this worker may have ended.
        while (line := self._lines.get(rank)) is not None and line.wait(0.0):
            self._read(rank)
        if rank in self._lines:
            raise Refusal(f"worker {rank} is connected already")
        peer.line.max_bytes = _LINE_BYTES
        self._lines[rank] = peer.line
        self._selector.register(peer.line, selectors.EVENT_READ, rank)
        self._answer_all(rank, lines)
        return True

    def _read(self, rank: int) -> None:
        """Answers a worker, or notices its end."""
        if (line := self._lines.get(rank)) is None:
            return
        lines = None
        with contextlib.suppress(OSError, ValueError):
            lines = line.receive_lines()
        if lines is None:
            self._drop(rank)
        else:
            self._answer_all(rank, lines)

    def _answer_all(self, rank: int, lines: list[bytes]) -> None:
        answers: dict[str, Callable[[Asked], str]] = {
            "initack": lambda _: self._greet(rank),
            "init": lambda _: "response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_maxes": lambda _: f"maxes {_join(_LIMITS)} rc=0",
            "get_appnum": lambda _: "appnum appnum=0 rc=0",
            "get_my_kvsname": lambda _: f"my_kvsname kvsname={self._name} rc=0",
            "get_universe_size": lambda _: f"universe_size size={self._size} rc=0",
            "put": lambda asked: self._put(rank, asked),
            "get": self._get,
            "finalize": lambda _: "finalize_ack rc=0",
        }
        try:
            for line in lines:
                asked = _parse(line)
                if asked.get("cmd") == "barrier_in":
                    self._wait(rank)
                elif answer := answers.get(asked.get("cmd", "")):
                    self._send(rank, answer(asked))
                else:
                    self._drop(rank)  # Such as "abort": the process ends itself.
        except (OSError, ValueError):
            self._drop(rank)

    def _greet(self, rank: int) -> str:
        told = {"size": self._size, "rank": rank, "debug": 0}
        lines = [f"cmd=set {name}={value}" for name, value in told.items()]
        return "\n".join(["initack rc=0", *lines])

    def _put(self, rank: int, asked: Asked) -> str:
        key, value = asked.get("key", ""), asked.get("value", "")
        count = sum(owner == rank for _, owner in self._table.values())
        fault = ""
        if self._table.get(key, ("", rank))[1] != rank:
            fault = "another_rank_has_put_this_key"
        elif len(key) > _LIMITS["keylen_max"] or len(value) > _LIMITS["vallen_max"]:
            fault = "too_long"
        elif key not in self._table and count >= _MOST_KEYS:
            fault = "too_many_keys"
        if fault:
            return f"put_result rc=1 msg={fault}"
        self._table[key] = value, rank
        return "put_result rc=0 msg=success"

    def _get(self, asked: Asked) -> str:
        value, _ = self._table.get(asked.get("key", ""), ("", 0))
        if not value:
            return "get_result rc=1 msg=unknown_key value=unknown"
        return f"get_result rc=0 msg=success value={value}"

    def _wait(self, rank: int) -> None:
        """Makes a worker wait for all others; the last to arrive releases all."""
        self._waiting.add(rank)
        if len(self._waiting) == self._size:
            waiting, self._waiting = self._waiting, set()
            for other in waiting:
                with contextlib.suppress(OSError):
                    self._send(other, "barrier_out rc=0")

    def _send(self, rank: int, answer: str) -> None:
        if (line := self._lines.get(rank)) is not None:
            line.send_line(_write(answer), timeout_s=_SEND_S)

    def _drop(self, rank: int) -> None:
        self._waiting.discard(rank)
        if (line := self._lines.pop(rank, None)) is not None:
            self._selector.unregister(line)
            line.close()


def _find_network() -> dict[str, str]:
    """Returns variables by which workers listen to each other on loopback alone.

    MPICH's UCX otherwise listens on all networks of the machine, and admits anyone.
    """
    names = [name for _, name in socket.if_nameindex()]
    is_given = "UCX_NET_DEVICES" in os.environ or _LOOPBACK not in names
    return {} if is_given else {"UCX_NET_DEVICES": _LOOPBACK}


def _parse(line: bytes) -> Asked:
    words = line.decode("latin-1").split()
    return dict(word.split("=", 1) for word in words)  # ValueError for other words.


def _write(answer: str) -> bytes:
    return f"cmd={answer}\n".encode("latin-1")


def _join(values: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
