"""A process's seat among those that train together: its rank, and where rank 0 is."""

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tw_core.internal import check_text, check_whole_number
from tw_launch import find_tf_config
from tw_launch.internal import is_loopback, join_address, split_address
from tw_ranks._joining.launchers import Place, find_places

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seat:
    """This process's rank, and the addresses at which rank 0 and it listen."""

    rank: int
    size: int
    coordinator: tuple[str, int]
    host: str  # "" until rank 0 is reached.
    port: int | None  # None for a free one.
    mpi_launcher: str = ""  # The one that gave this process the same rank.
    spans_machines: bool = False  # According to launchers; False if unknown.

    @property
    def is_told(self) -> bool:
        """Whether only MPI tells the others where rank 0 listens, at a free port."""
        return self.size > 1 and not self.coordinator[1]


_ALONE = Seat(0, 1, ("localhost", 0), "localhost", None)


def find_seat(
    coordinator: str | None = None,
    rank: int | None = None,
    size: int | None = None,
    *,
    has_mpi4py: bool = False,
) -> Seat:
    """Finds this process's seat in the arguments of ``join``, or by its launcher."""
    if coordinator is None and (rank is not None or size is not None):
        raise ValueError("join: rank and size need a coordinator; pass all three.")
    places = find_places(os.environ)
    if coordinator is not None:
        name, seat = "the arguments", _seat_from_arguments(coordinator, rank, size)
    elif told := _seat_from_tf_config():
        name, seat = "TF_CONFIG", told
        _check_not_alone(name, seat, places)
    elif places:
        own, *places = places
        name, seat = own.launcher, _seat_from_place(own, has_mpi4py=has_mpi4py)
        _check_not_alone(name, seat, places)
    else:
        return _ALONE
    _say(name, seat, places)
    for place in places:
        if place.is_mpi and (place.rank, place.size) == (seat.rank, seat.size):
            return replace(seat, mpi_launcher=place.launcher)
    return seat


def _seat_from_arguments(coordinator: str, rank: int | None, size: int | None) -> Seat:
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
            "processes; start the program with `tw-launch -n N`."
        )
    rank = task.replica_index
    if rank is None:
        raise ValueError(f"join: TF_CONFIG makes this task {task.job}, not a worker.")
    addresses = [task.addresses[job][index] for job, index in task.replicas]
    first, (host, port) = split_address(addresses[0]), split_address(addresses[rank])
    hosts = {split_address(address)[0] for address in addresses}
    return Seat(
        *(rank, len(addresses), first, host, None if rank == 0 else port),
        spans_machines=len(hosts) > 1 and not any(map(is_loopback, hosts)),
    )


def _seat_from_place(place: Place, *, has_mpi4py: bool) -> Seat:
    otherwise = "call join(coordinator='host:port', rank=..., size=...)"
    if place.fault:
        raise ValueError(
            f"join: {place.launcher} has started this process, but {place.fault}; "
            f"correct that, or {otherwise}."
        )
    if place.size == 1:
        return _ALONE
    if place.coordinator is None and not (place.is_mpi and has_mpi4py):
        instead = "pip install mpi4py, by which rank 0 can send it"
        raise ValueError(
            f"join: {place.launcher} has started this process, but does not say on "
            "which machine rank 0 is; "
            f"{instead if place.is_mpi else 'start it with tw-launch'}, or {otherwise}."
        )
    address = place.coordinator or (socket.gethostname(), 0)
    host = "" if place.rank else address[0]
    launcher = place.launcher if place.is_mpi else ""
    return Seat(
        *(place.rank, place.size, address, host, None, launcher),
        spans_machines=place.spans_machines,
    )


def _check_not_alone(name: str, seat: Seat, places: Sequence[Place]) -> None:
    """Refuses processes that would train separately if one launcher started them."""
    for place in places if seat.size == 1 else ():
        if place.size > 1:
            raise ValueError(
                f"join: by {name} this process is alone, but {place.launcher} has "
                f"started it as rank {place.rank} of {place.size}, and each would "
                f"train separately; if you want that, unset {place.variable} or call "
                "join(coordinator='localhost:1', rank=0, size=1)."
            )


def _say(name: str, seat: Seat, overridden: Sequence[Place]) -> None:
    """Logs what was found, and what it overrides."""
    at = "alone"
    if seat.size > 1:
        told = "an address sent by MPI"
        at = f"rank 0 at {told if seat.is_told else join_address(*seat.coordinator)}"
    over = ", ".join(
        f"{place.launcher} ({place.fault or f'rank {place.rank} of {place.size}'})"
        for place in overridden
    )
    _log.info(
        "join: rank %d of %d by %s, %s%s.",
        *(seat.rank, seat.size, name, at, over and f"; overrides {over}"),
    )
