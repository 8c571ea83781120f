"""MPI as an engine: operations on all ranks' arrays that end when a rank is lost.

Operations are started without blocking, and polled. The group's verdict is checked
between polls, so that a lost rank ends the wait. A wait begins without pauses. In the
first wait of an exchange pauses then grow, as a slow rank may need the processor; after
it all ranks are there, and polls move the bytes, so pauses stay short. Large data
follows a barrier for the same reason.

Each exchange has its own communicator: ranks may start independent exchanges in
different orders.
"""

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_TAG = 6_144
"""Of the messages before this group has its own communicator."""

_ALIGNMENT = 64
"""TensorFlow takes arrays without a copy if their bytes begin at such an address."""

_BARRIER_BYTES = 1 << 16
"""Data of at least so many bytes is exchanged after a barrier."""

_KEEN_S, _PATIENT_S = 0.05, 0.0
"""How long pauses stay short when all ranks are there, and otherwise."""

_SPIN_S = 1e-4
"""How long a wait has no pauses. With 50 ms, a hundred variables took 10 times as long
on a machine with more threads than processors, and no longer on another."""

_PAUSES, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1 / 16, 2e-5, 0.005
"""A growing pause is this part of the time waited, within these bounds."""

_REPORTS_S = 1.0
"""Time for the others to report a loss before this process ends, and MPI with it."""

MAX_COMMUNICATORS = 256
"""Later eager exchanges share one; MPICH has about 2,000 in all."""


class EndedError(Exception):
    """A rank is missing, this one has left, or the time is up."""

    def __init__(self) -> None:
        super().__init__("the exchange was aborted: a rank is missing or has left")


class MpiEngine:
    """This process's place in MPI, and the communicators of exchanges."""

    def __init__(self) -> None:
        """Starts MPI, unless the program has; waits for all processes."""
        was_started = "mpi4py.MPI" in sys.modules
        import mpi4py

        if not was_started:
            mpi4py.rc.finalize = False  # It would wait for lost ranks forever.
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError(
                "join: MPI runs without MPI_THREAD_MULTIPLE, which exchanges in "
                "several threads need; do not set mpi4py.rc.thread_level, or join with "
                "engine='tensorflow'."
            )
        self._finalizes_itself = was_started and mpi4py.rc.finalize is not False
        self._mpi = MPI
        self._base: Any = MPI.COMM_WORLD  # Replaced once all ranks are there.
        self.rank, self.size = self._base.rank, self._base.size
        self.library = MPI.Get_library_version().splitlines()[0].strip()
        self._ops = {"Add": MPI.SUM, "Mul": MPI.PROD, "Min": MPI.MIN, "Max": MPI.MAX}
        self._is_ended: Callable[[], bool] = lambda: False
        self._communicators: dict[int, Any] = {}
        self._sharing = threading.Lock()
        self._running = threading.local()
        self._left_over: list[Any] = []  # MPI may still write to it.

    def tell_address(self, host: str, port: int, key: str) -> None:
        """Sends rank 0's address and the run's key to all other ranks."""
        told = np.frombuffer(f"{host} {port} {key}".ljust(512).encode(), np.uint8)
        ranks = range(1, self.size)
        self._left_over += [(told, self._base.Isend(told, r, _TAG)) for r in ranks]

    def hear_address(self, end_s: float) -> tuple[tuple[str, int], str]:
        """Returns where rank 0 listens, and the key; EndedError after ``end_s``."""
        told = np.empty(512, np.uint8)
        self._is_ended = lambda: time.monotonic() >= end_s
        self._await(self._base.Irecv(told, 0, _TAG), told, keen_s=_PATIENT_S)
        host, port, key = told.tobytes().decode().split()
        return (host, int(port)), key

    def open(self, is_ended: Callable[[], bool]) -> None:
        """Begins exchanges of all ranks, which end when ``is_ended()``."""
        self._is_ended = is_ended
        self._base = self._make_communicator(_TAG)

    def _find_communicator(self) -> Any:
        """Returns the exchange's communicator, made once all ranks have reached it."""
        key = self._running.key
        if (known := self._communicators.get(key)) is not None:
            return known
        tag = key % self._mpi.COMM_WORLD.Get_attr(self._mpi.TAG_UB)
        others = [rank for rank in range(self.size) if rank != self.rank]
        nothing = np.empty(0, np.uint8)
        requests = [self._base.Irecv(nothing, rank, tag) for rank in others]
        requests += [self._base.Isend(nothing, rank, tag) for rank in others]
        for request in requests:
            self._await(request, nothing, keen_s=_PATIENT_S)
        made = self._communicators[key] = self._make_communicator(tag)
        return made

    def _make_communicator(self, tag: int) -> Any:
        """Makes one in a thread: MPI cannot poll for it, and may not return."""
        made: list[Any] = []

        def make() -> None:
            try:
                made.append(self._base.Create_group(self._base.Get_group(), tag))
            except Exception as error:  # It is raised where it is waited for.
                made.append(error)

        thread = threading.Thread(target=make, name="tw-ranks-mpi", daemon=True)
        thread.start()
        while not made:
            thread.join(_LONGEST_PAUSE_S)
            if not made and self._is_ended():
                raise EndedError
        if isinstance(made[0], Exception):
            raise made[0]
        return made[0]

    @contextlib.contextmanager
    def exchange(
        self, key: int, shapes: Sequence[tuple[Any, Any]], *, in_order: bool
    ) -> Iterator[None]:
        """Scope of the operations of one exchange in this thread.

        ``shapes`` are tensors with their shapes as far as ranks know each other's.
        ``in_order`` says that this process runs it in the order of the program.
        """
        running, running.is_in_exchange = self._running, True
        with self._sharing if in_order else contextlib.nullcontext():
            try:
                running.shapes = {id(tensor): shape for tensor, shape in shapes}
                running.key, running.have_met = -1 if in_order else key, False
                yield
            finally:
                running.shapes, running.is_in_exchange = {}, False

    def is_in_exchange(self) -> bool:
        """Returns whether this thread is in the scope of ``exchange``."""
        return bool(getattr(self._running, "is_in_exchange", False))

    def known_shape(self, tensor: Any) -> Any:
        """Returns a tensor's shape as far as ranks know each other's."""
        return self._running.shapes.get(id(tensor), tensor.shape)

    def add_up(self, array: np.ndarray, op: str, *, divides: bool) -> np.ndarray:
        """Combines arrays of 32 or 64 bits by an op of ``_collectives.add_up``."""
        if op in ("Min", "Max") and array.dtype.kind == "f":
            # MPI's result depends on the order, which differs by rank, if there is a
            # NaN or a zero of the other sign.
            every = self.gather(array[np.newaxis])
            combine = np.minimum if op == "Min" else np.maximum
            return combine.reduce(every, axis=0, out=_empty(array.shape, array.dtype))
        combined = _empty(array.shape, array.dtype)
        self._run("Iallreduce", array, combined, op=self._ops[op])
        if divides:
            np.divide(combined, array.dtype.type(self.size), out=combined)
        return combined

    def gather(self, array: np.ndarray) -> np.ndarray:
        """Joins [R, ...] of all ranks to [size R, ...]."""
        rows, *rest = array.shape
        gathered = _empty((self.size * rows, *rest), array.dtype)
        self._run("Iallgather", array, gathered)
        return gathered

    def reduce_scatter(self, array: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """Adds [sum of lengths] over the ranks; returns this rank's part."""
        own = _empty([lengths[self.rank]], array.dtype)
        self._run(
            "Ireduce_scatter", array, own, recvcounts=lengths, op=self._ops["Add"]
        )
        return own

    def all_gather(self, array: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """Joins flat arrays, of each rank's length."""
        joined = _empty([sum(lengths)], array.dtype)
        counts = [length * array.itemsize for length in lengths]
        self._run("Iallgatherv", array, joined, counts=counts)
        return joined

    def swap(self, array: np.ndarray) -> np.ndarray:
        """Sends row r of [size, ...] to rank r."""
        swapped = _empty(array.shape, array.dtype)
        self._run("Ialltoall", array, swapped)
        return swapped

    def send(self, array: np.ndarray) -> np.ndarray:
        """Sends an array to all other ranks; returns a copy."""
        copy = _empty(array.shape, array.dtype)
        np.copyto(copy, array)
        self._run("Ibcast", copy, root=self.rank)
        return copy

    def receive(self, shape: Sequence[int], dtype: Any, root: int) -> np.ndarray:
        """Returns the array that rank ``root`` sends."""
        received = _empty(shape, dtype)
        self._run("Ibcast", received, root=root)
        return received

    def _run(
        self,
        name: str,
        *arrays: np.ndarray,
        counts: Sequence[int] = (),
        **options: Any,
    ) -> None:
        """Runs a collective of the communicator of this thread's exchange.

        ``counts`` are the bytes that it takes from each rank, if these differ.
        """
        running, communicator = self._running, self._find_communicator()
        size = sum(counts) or arrays[0].nbytes  # the same on all ranks
        # A broadcast's root does not wait, nor does any rank for zero bytes.
        if not running.have_met and (
            size >= _BARRIER_BYTES or not size or name == "Ibcast"
        ):
            self._await(communicator.Ibarrier(), None, keen_s=_PATIENT_S)
            running.have_met = True
        if not size:
            return
        is_sum, sent = "op" in options, list[Any](arrays)
        if not is_sum:
            sent = [_bytes(own) for own in arrays]
        if counts:
            sent[1] = [sent[1], counts]
        request = getattr(communicator, name)(*sent, **options)
        keen_s = _KEEN_S if running.have_met else _PATIENT_S
        self._await(request, arrays, keen_s=keen_s)
        running.have_met = True

    def _await(self, request: Any, data: Any, *, keen_s: float) -> None:
        """Polls until a request is done; pauses grow after ``keen_s``."""
        has_arrived = request.Test
        if has_arrived():
            return
        began_s = time.perf_counter()
        try:
            while not has_arrived():
                waited_s = time.perf_counter() - began_s
                if waited_s < _SPIN_S:
                    os.sched_yield()  # To a rank that shares this processor.
                    continue
                if self._is_ended():
                    raise EndedError
                pause_s = waited_s * _PAUSES if waited_s > keen_s else 0.0
                time.sleep(min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, pause_s)))
        except BaseException:
            self._left_over.append((request, data))
            raise

    def end(self, *, is_lost: bool, status: int, within_s: float) -> None:
        """Ends MPI with the process, which must not wait for a lost rank.

        Without a lost rank it waits for the others, as MPI does. Otherwise MPI is not
        finalized: its launcher ends all processes once one has ended with an error. A
        process that ends well, or whose MPI finalizes itself, aborts.
        """
        if self._mpi.Is_finalized():
            return
        if not is_lost:
            end_s = time.monotonic() + within_s
            self._is_ended = lambda: time.monotonic() >= end_s
            try:
                self._await(self._base.Ibarrier(), None, keen_s=_PATIENT_S)
                self._mpi.Finalize()
                return
            except EndedError:
                status = 0
        _remove_shared_memory()
        time.sleep(_REPORTS_S)
        if self._finalizes_itself or not status:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            self._mpi.COMM_WORLD.Abort(status or 1)


def _remove_shared_memory() -> None:
    """Removes the files that MPICH leaves in shared memory if not finalized."""
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text()
        for name in set(re.findall(r"/dev/shm/mpich_shm\S+", maps)):
            Path(name).unlink(missing_ok=True)


def _empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Returns an array that TensorFlow takes without a copy."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    aligned: np.ndarray = memory[first : first + size].view(dtype).reshape(shape)
    return aligned


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
