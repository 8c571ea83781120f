"""A process's seat among those that train together: its rank, and where rank 0 is."""

from dataclasses import dataclass

from tw_core.checks import check_text, check_whole_number
from tw_syncrep.cluster._addresses import split_address
from tw_syncrep.cluster._tf_config import find_tf_config


@dataclass(frozen=True)
class Seat:
    """This process's rank, and the addresses at which rank 0 and it listen."""

    rank: int
    size: int
    coordinator: tuple[str, int]
    host: str  # "" until rank 0 is reached.
    port: int | None  # None for a free one.


def find_seat(
    coordinator: str | None = None, rank: int | None = None, size: int | None = None
) -> Seat:
    """Finds this process's seat in the arguments of ``join``, or in TF_CONFIG."""
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


def _seat_from_tf_config() -> Seat:
    task = find_tf_config()
    if task is None:
        return Seat(0, 1, ("localhost", 0), "localhost", None)
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
