"""Makes the workers of one machine one MPI world, over PMI-1, as MPICH's launchers do.

An MPI process asks its launcher for its rank, puts its address into a table, waits
until all have, and reads the others'. That is all that ``mpiexec`` does for MPI beyond
starting processes, which ``tw-launch`` does itself: so each worker's output, end and
restarts are those of any other task. MPICH, Intel MPI and MVAPICH speak PMI-1.
"""

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable

_LIMITS = {"kvsname_max": 64, "keylen_max": 64, "vallen_max": 1024}


class PmiTable:
    """The table of one start of all workers, served until ``close``."""

    def __init__(self, size: int) -> None:
        """Begins to listen, only for processes of this machine."""
        self._size = size
        # MPICH names a file of shared memory after it, which a killed run leaves there.
        self._name = f"tw_launch_{secrets.token_hex(8)}"
        # All ranks are on one node, so that they share memory.
        self._table = {"PMI_process_mapping": f"(vector,(0,1,{size}))"}
        self._waiting: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def variables(self, rank: int) -> dict[str, str]:
        """Returns the environment by which a worker finds its place."""
        host, port = self._listener.getsockname()
        return {
            "PMI_PORT": f"{host}:{port}",
            "PMI_ID": str(rank),
            "PMI_RANK": str(rank),
            "PMI_SIZE": str(self._size),
            "MPI_LOCALRANKID": str(rank),
            "MPI_LOCALNRANKS": str(self._size),
        }

    def close(self) -> None:
        """Accepts no more workers."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # It is closed.
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(
                    target=self._serve, args=(connection,), daemon=True
                ).start()

    def _serve(self, connection: socket.socket) -> None:
        answers: dict[str, Callable[[dict[str, str]], str]] = {
            "initack": self._greet,
            "init": lambda _: "response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_maxes": lambda _: f"maxes {_join(_LIMITS)} rc=0",
            "get_appnum": lambda _: "appnum appnum=0 rc=0",
            "get_my_kvsname": lambda _: f"my_kvsname kvsname={self._name} rc=0",
            "get_universe_size": lambda _: f"universe_size size={self._size} rc=0",
            "put": self._put,
            "get": self._get,
            "finalize": lambda _: "finalize_ack rc=0",
        }
        with (
            contextlib.suppress(OSError, ValueError, KeyError),
            connection,
            connection.makefile("r", encoding="latin-1") as lines,
        ):
            while line := lines.readline(1 << 12):
                asked = dict(word.split("=", 1) for word in line.split())
                if asked.get("cmd") == "barrier_in":
                    self._wait(connection)
                elif answer := answers.get(asked.get("cmd", "")):
                    _tell(connection, answer(asked))
                else:
                    break  # Such as "abort": the process ends itself.

    def _greet(self, asked: dict[str, str]) -> str:
        rank = int(asked["pmiid"])
        told = {"size": self._size, "rank": rank, "debug": 0}
        lines = [f"cmd=set {name}={value}" for name, value in told.items()]
        return "\n".join(["initack rc=0", *lines])

    def _put(self, asked: dict[str, str]) -> str:
        self._table[asked.get("key", "")] = asked.get("value", "")
        return "put_result rc=0 msg=success"

    def _get(self, asked: dict[str, str]) -> str:
        value = self._table.get(asked.get("key", ""))
        if value is None:
            return "get_result rc=1 msg=unknown_key value=unknown"
        return f"get_result rc=0 msg=success value={value}"

    def _wait(self, connection: socket.socket) -> None:
        """Makes a worker wait for all others; the last to arrive releases all."""
        with self._lock:
            self._waiting.append(connection)
            if len(self._waiting) < self._size:
                return
            waiting, self._waiting = self._waiting, []
        for other in waiting:
            with contextlib.suppress(OSError):
                _tell(other, "barrier_out rc=0")


def _tell(connection: socket.socket, answer: str) -> None:
    connection.sendall(f"cmd={answer}\n".encode("latin-1"))


def _join(values: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
