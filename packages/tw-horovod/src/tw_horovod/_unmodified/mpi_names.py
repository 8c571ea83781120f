"""The part of mpi4py that Horovod programs call, over the same ranks.

It stands in if mpi4py is not installed: programs ask MPI for the rank, for logs, or
send a few arrays.
"""

import importlib
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tw_ranks.internal import find_seat

_log = logging.getLogger(__name__)
_LAUNCHED = ("PMI_RANK", "PMIX_RANK", "PMI_FD")  # set by MPI launchers


def find(name: str, file: str) -> None:
    """Puts the installed package ``name`` in the place of ``file``, or a stand-in."""
    folder, own = str(Path(file).parent), sys.modules.pop(name)
    path = list(sys.path)
    sys.path[:] = [entry for entry in path if entry != folder]
    try:
        importlib.import_module(name)
        if find_seat().size > 1 and not any(map(os.environ.get, _LAUNCHED)):
            _log.warning(
                "%s is installed, but no MPI launcher started this process, so every "
                "process is rank 0 to MPI. Uninstall it to get Horovod's ranks.",
                name,
            )
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        sys.modules[name] = own
        mpi = _Names(f"{name}.MPI")
        mpi.COMM_WORLD = _AllRanks()
        vars(own)["MPI"] = sys.modules[f"{name}.MPI"] = mpi
    finally:
        sys.path[:] = path


class _Names(ModuleType):
    COMM_WORLD: "_AllRanks"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{self.__name__}.{name}: tw-launch --horovod has COMM_WORLD, its rank, "
            "size, barrier, broadcasts and allgather; for the rest, install mpi4py and "
            "start the program with an MPI launcher"
        )


class _AllRanks:
    """MPI's communicator of all ranks; it knows them before ``hvd.init``."""

    @property
    def rank(self) -> int:
        return find_seat().rank

    @property
    def size(self) -> int:
        return find_seat().size

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Barrier(self) -> None:
        _hvd().barrier()

    barrier = Barrier

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return _hvd().broadcast_object(obj, root)

    def Bcast(self, buf: Any, root: int = 0) -> None:
        buf[...] = self.bcast(buf, root)

    def allgather(self, sendobj: Any) -> list[Any]:
        found: list[Any] = _hvd().allgather_object(sendobj)
        return found


def _hvd() -> Any:
    return importlib.import_module("tw_horovod")
