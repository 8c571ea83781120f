"""Which ranks share a machine: there they add before anything is sent to others."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Hosts:
    """This rank's place among its machine's ranks, and among the machines.

    >>> Hosts.of([0, 0, 1], rank=1)
    Hosts(host=0, num_hosts=2, local_rank=1, local_size=2)
    """

    host: int
    num_hosts: int
    local_rank: int
    local_size: int

    @classmethod
    def of(cls, hosts: Sequence[int], rank: int) -> "Hosts | None":
        """Finds a rank's place by all ranks' machines, from 0.

        None where no machine has two ranks, or one has all.
        """
        num_hosts, own = len(set(hosts)), hosts[rank]
        if not 1 < num_hosts < len(hosts):
            return None
        here = [other for other, host in enumerate(hosts) if host == own]
        return cls(own, num_hosts, here.index(rank), len(here))

    @property
    def is_first(self) -> bool:
        """Whether this rank adds with the first ranks of other machines."""
        return self.local_rank == 0
