"""Gives programs of others ``tw_syncrep.horovod`` under Horovod's name, when imported.

Some ask ``mpi4py`` besides, for logs or to send a few arrays. What they call of it is
here, over the same ranks; of MPI without its own launcher every process is rank 0.
"""

import sys
import types
from typing import Any

import tw_syncrep.horovod as hvd


class _World:
    """MPI's communicator of all ranks; of a program that has not begun, of itself."""

    def Get_rank(self) -> int:
        return hvd.rank() if hvd.is_initialized() else 0

    def Get_size(self) -> int:
        return hvd.size() if hvd.is_initialized() else 1

    def Bcast(self, array: Any, root: int = 0) -> None:
        array[...] = hvd.broadcast_object(array, root)

    def allgather(self, one: Any) -> list[Any]:
        return hvd.allgather_object(one)


for _name, _contents in {
    "horovod": {"tensorflow": hvd},
    "mpi4py": {"MPI": types.SimpleNamespace(COMM_WORLD=_World())},
}.items():
    sys.modules[_name] = types.ModuleType(_name)
    vars(sys.modules[_name]).update(_contents)
sys.modules["horovod.tensorflow"] = hvd
