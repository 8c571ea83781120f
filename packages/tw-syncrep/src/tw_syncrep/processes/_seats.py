"""A process's seat among those that train together: its rank, and where rank 0 is."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tw_core.checks import check_text, check_whole_number
from tw_syncrep.cluster._addresses import split_address
from tw_syncrep.cluster._tf_config import find_tf_config

_MPI = {
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"): "MPI's mpiexec",
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ): "Open MPI's mpirun",
}
"""Variables of the rank, the size, and the ranks on this machine; their launcher."""


@dataclass(frozen=True)
class Seat:
    """This process's rank, and the addresses at which rank 0 and it listen."""

    rank: int
    size: int
    coordinator: tuple[str, int]
    host: str  # "" until rank 0 is reached.
    port: int | None  # None for a free one.
    mpi_launcher: str = ""  # That started this rank; "" if none.

    @property
    def is_told(self) -> bool:
        """Whether MPI tells the others where rank 0 listens, at a free port."""
        return self.size > 1 and not self.coordinator[1]


def find_seat(
    coordinator: str | None = None, rank: int | None = None, size: int | None = None
) -> Seat:
    """Finds this process's seat in the arguments of ``join``, TF_CONFIG, or MPI's."""
    seat, mpi = _find_told(coordinator, rank, size), find_mpi()
    if mpi is not None and seat is None:
        return mpi
    seat = seat or Seat(0, 1, ("localhost", 0), "localhost", None)
    is_of_mpi = mpi is not None and (mpi.rank, mpi.size) == (seat.rank, seat.size)
    return replace(seat, mpi_launcher=mpi.mpi_launcher) if mpi and is_of_mpi else seat


def find_mpi(environment: Mapping[str, str] = os.environ) -> Seat | None:
    """Returns the seat that MPI's launcher has given this process."""
    for names, launcher in _MPI.items():
        rank, size, local_size = (environment.get(name, "") for name in names)
        if rank.isdecimal() and size.isdecimal():
            host = "127.0.0.1" if local_size == size else socket.gethostname()
            own = host if rank == "0" else ""
            return Seat(int(rank), int(size), (host, 0), own, None, launcher)
    return None


def _find_told(
    coordinator: str | None, rank: int | None, size: int | None
) -> Seat | None:
    if coordinator is None:
        if rank is not None or size is not None:
            raise ValueError("join: rank and size are given with coordinator only.")
        return _seat_from_tf_config()
    check_text(coordinator=coordinator)
    count = check_whole_number(size=size, at_least=1)
    own = check_whole_number(rank=rank, at_least=0)
    try:
        address = split_address(coordinator)
    except ValueError:
        raise ValueError(
            "join: coordinator must be '[IPv6 host]:port' or 'host:port'; got "
            f"{coordinator!r}."
        ) from None
    if own >= count:
        raise ValueError(f"join: rank must be 0 to {count - 1}; got {own}.")
    return Seat(own, count, address, address[0] if own == 0 else "", None)


def _seat_from_tf_config() -> Seat | None:
    task = find_tf_config()
    if task is None:
        return None
    if task.addresses.get("ps"):
        raise ValueError(
            "join: TF_CONFIG has parameter servers, which take no part in sums between "
            "processes; start the program with `tw-launch --ps 0`."
        )
    rank = task.replica_index
    if rank is None:
        raise ValueError(f"join: TF_CONFIG makes this task {task.job}, not a worker.")
    addresses = [task.addresses[job][index] for job, index in task.replicas]
    first, (host, port) = split_address(addresses[0]), split_address(addresses[rank])
    return Seat(rank, len(addresses), first, host, None if rank == 0 else port)
