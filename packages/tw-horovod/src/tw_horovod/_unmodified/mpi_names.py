"""The part of mpi4py that Horovod programs call, over the same ranks.

It stands in if mpi4py is not installed: programs ask MPI for the rank, for logs, send a
few arrays, or add gradients by ``Allreduce``, as those of OpenAI's baselines do.
"""

import functools
import importlib
import logging
import operator
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

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
        vars(mpi).update(COMM_WORLD=_AllRanks(), IN_PLACE=_IN_PLACE, **_OPS)
        vars(own)["MPI"] = sys.modules[f"{name}.MPI"] = mpi
        vars(own)["__getattr__"] = functools.partial(_refuse, name)
    finally:
        sys.path[:] = path


class _Op:
    """One of MPI's reductions."""

    def __init__(self, name: str, combine: Callable[[Any, Any], Any]) -> None:
        self.name, self._combine = name, combine

    def __call__(self, one: Any, other: Any) -> Any:
        return self._combine(one, other)


_SUM = _Op("Sum", operator.add)
_OPS = {
    "SUM": _SUM,
    "PROD": _Op("Product", operator.mul),
    "MIN": _Op("Min", min),
    "MAX": _Op("Max", max),
}
_IN_PLACE = object()


def _refuse(owner: str, name: str) -> NoReturn:
    raise AttributeError(
        f"{owner}.{name}: tw-launch --horovod has MPI.COMM_WORLD with rank, size, "
        "barriers, broadcasts, gather, allgather, Allgather, allreduce and Allreduce "
        f"({', '.join(_OPS)}); for the rest, install mpi4py and start the program "
        "with an MPI launcher"
    )


class _Names(ModuleType):
    def __getattr__(self, name: str) -> NoReturn:
        _refuse(self.__name__, name)


class _AllRanks:
    """MPI's communicator of all ranks; it knows them before ``hvd.init``."""

    def __getattr__(self, name: str) -> NoReturn:
        _refuse("MPI.COMM_WORLD", name)

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
        _fill("buf", buf, self.bcast(buf, root))

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        found = self.allgather(sendobj)
        return found if self.rank == root else None

    def allgather(self, sendobj: Any) -> list[Any]:
        found: list[Any] = _hvd().allgather_object(sendobj)
        return found

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        parts = self.allgather(np.asarray(sendbuf))
        _fill("recvbuf", recvbuf, np.stack(parts))

    def allreduce(self, sendobj: Any, op: Callable[[Any, Any], Any] = _SUM) -> Any:
        return functools.reduce(op, self.allgather(sendobj))

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: _Op = _SUM) -> None:
        own = np.asarray(recvbuf if sendbuf is _IN_PLACE else sendbuf)
        if op not in _OPS.values():
            raise TypeError(f"op must be one of MPI.{', MPI.'.join(_OPS)}; got {op!r}.")
        hvd = _hvd()
        # Here, as programs import mpi4py for the rank, before they set up TensorFlow.
        from tw_ranks.internal import eager_mode

        with eager_mode():
            total = hvd.allreduce(own, op=getattr(hvd, op.name)).numpy()
        _fill("recvbuf", recvbuf, total)


def _fill(name: str, buffer: Any, values: Any) -> None:
    """Writes values into a buffer of as many elements, in its own shape."""
    values = np.asarray(values)
    if not isinstance(buffer, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array; got {buffer!r}.")
    if (buffer.dtype, buffer.size) != (values.dtype, values.size):
        raise ValueError(
            f"{name} must have {values.size} elements of {values.dtype}; got "
            f"{buffer.size} of {buffer.dtype}."
        )
    buffer[...] = values.reshape(buffer.shape)


def _hvd() -> Any:
    """Returns tw_horovod, initialized: programs of MPI alone do not know it."""
    hvd = importlib.import_module("tw_horovod")
    if not hvd.is_initialized():
        try:
            hvd.init()
        except RuntimeError as error:
            error.add_note(
                "The first exchange over MPI.COMM_WORLD joins; for that, call "
                "MPI.COMM_WORLD.Barrier() when the program begins."
            )
            raise
    return hvd
