"""A process group: the processes that train together, and this one's place among them.

Every process is one rank. TensorFlow's eager runtime becomes a cluster of all ranks,
over which its collectives run; the side channel knows which ranks are missing.
"""

import atexit
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, ParamSpec, TypeVar

from tw_ranks._endpoint.endpoint import Carrier, Endpoint
from tw_ranks._endpoint.hosts import Hosts
from tw_ranks._endpoint.interrupts import InterruptWatch
from tw_ranks._endpoint.keys import Keys
from tw_ranks._endpoint.progress import Progress
from tw_ranks._endpoint.reports import Reports
from tw_ranks._engines.choice import Engine
from tw_ranks._engines.mpi import MpiEngine
from tw_ranks._exchanges.broadcasting import give_variables
from tw_ranks._exchanges.parts import (
    all_gather_parts,
    all_to_all_rows,
    reduce_scatter_parts,
)
from tw_ranks._exchanges.reduction import sum_over_ranks
from tw_ranks._side_channel._attendance import Deadlines
from tw_ranks._side_channel._coordinator import Coordinator
from tw_ranks._side_channel._introduction import Introduction, find_local_ranks
from tw_ranks._side_channel._member import Member

_P = ParamSpec("_P")
_R = TypeVar("_R")

BUCKET_BYTES = 1 << 20
"""Of gradients that are sent together between machines."""


class ProcessGroup:
    """The processes that train together, as seen by one of them.

    Made by ``join``. A process is one rank, however many towers it has.

    Attributes:
      rank: this process's rank, from 0.
      size: number of ranks.
      local_rank: this process's rank among those on its machine, from 0.
      local_size: number of ranks on this machine.
      node_rank: this machine's index; machines are in the order of their first ranks.
      num_nodes: number of machines.
      node_ranks: ``node_rank`` of every rank.
      tasks: "host, process 123" of every rank.
      has_left: whether this process has left the group.
    """

    def __init__(
        self,
        introductions: Sequence[Introduction],
        rank: int,
        engine: Engine,
        *,
        member: Member | None,
        coordinator: Coordinator | None,
        limits: Deadlines,
        bucket_bytes: int | None = None,
        start_runtime: Callable[[], None] | None = None,
        mpi: MpiEngine | None = None,
    ) -> None:
        """Called only by ``join``; from then on this rank reports its progress.

        Args:
          introductions: those of all ranks, by rank.
          rank: this process's rank.
          engine: the library that carries the tensors.
          member: the connection to rank 0; None in a group of one.
          coordinator: rank 0's thread that answers all ranks; None on other ranks.
          limits: the deadlines of waits.
          bucket_bytes: of gradients that are sent together; None for the default.
          start_runtime: starts TensorFlow's runtime at the first exchange.
          mpi: MPI, if it is the engine.
        """
        machines = list(dict.fromkeys(other.machine for other in introductions))
        here = find_local_ranks(introductions, rank)
        self.rank, self.size = rank, len(introductions)
        self.local_rank, self.local_size = here.index(rank), len(here)
        self.node_ranks = tuple(machines.index(o.machine) for o in introductions)
        self.node_rank, self.num_nodes = self.node_ranks[rank], len(machines)
        self.tasks = tuple(other.task for other in introductions)
        self.has_left = self._has_lost = False
        if bucket_bytes is None and self.num_nodes > 1 and engine.name != "nccl":
            bucket_bytes = BUCKET_BYTES
        adds_on_hosts = engine.name == "tensorflow"  # NCCL and MPI do it themselves.
        self._coordinator = coordinator
        self._exit = sys.exit
        self._exits: tuple[Any, float] = (None, 0.0)
        self._limits = limits
        progress = Progress()
        self._interrupts: InterruptWatch | None = None
        if mpi is not None:
            atexit.register(self._end_mpi, os.getpid())
        if member is not None:
            self._interrupts = InterruptWatch(
                progress.is_inside,
                member.give_up,
                must_defer=mpi.is_in_exchange if mpi is not None else lambda: False,
            )
        reports = Reports(
            *(rank, self.tasks),
            member=member,
            progress=progress,
            interrupts=self._interrupts,
            limits=limits,
            engine=f"{engine.name}, as {engine.reason}",
            aborts=mpi is None,
        )
        self._endpoint = Endpoint(
            *(rank, self.size, Carrier(engine, mpi), progress, reports),
            keys=Keys(progress, reports, start_runtime),
            bucket_bytes=bucket_bytes,
            hosts=Hosts.of(self.node_ranks, rank) if adds_on_hosts else None,
        )
        if member is not None:
            member.start(reports.read_report, reports.abort)
            # Otherwise an ``atexit`` function cannot find out how the program ends.
            sys.exit = self._note_exit
            os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._leave_at_exit, os.getpid())

    @property
    def engine(self) -> str:
        """The engine that carries exchanges: "tensorflow", "nccl" or "mpi"."""
        return self._endpoint.carrier.engine.name

    @property
    def engine_reason(self) -> str:
        """Why the engine was chosen."""
        return self._endpoint.carrier.engine.reason

    @property
    def falls_back(self) -> bool:
        """Whether TensorFlow's ring takes over if NCCL adds wrongly."""
        return self._endpoint.carrier.engine.falls_back

    @property
    def bucket_bytes(self) -> int | None:
        """How many bytes of gradients are sent together; None for all."""
        return self._endpoint.bucket_bytes

    @contextmanager
    def in_any_order(self, of: object) -> Iterator[bool]:
        """Scope in which functions are traced whose exchanges may begin in any order.

        Functions that are traced with the same owner, ``of``, are steps of one program:
        ranks may be in different ones. Yields False if the order must be that of the
        program: NCCL needs one order on all ranks, and so do calls of MPI, each of
        which holds a thread until all ranks have made it.
        """
        with self._endpoint.progress.in_any_order(of):
            yield self.engine == "tensorflow"

    def __repr__(self) -> str:
        """Shows the rank and the size."""
        return f"ProcessGroup(rank={self.rank}, size={self.size})"

    def bounded(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Makes a function that runs collectives raise errors that name missing ranks.

        TensorFlow's error for a collective whose peer is lost does not name the rank.
        Wrap the function that calls collectives, e.g. the training step::

            @group.bounded
            @tf.function
            def step(images, labels): ...

        Args:
          function: one that runs collectives of this group.

        Returns:
          The function, raising ``RankTimeoutError`` instead.
        """

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self._endpoint.reports.naming_missing("bounded call"):
                return function(*args, **kwargs)

        return call

    def sum(
        self,
        tensors: Sequence[Any],
        *,
        names: Sequence[str] = (),
        wire_dtype: Any = None,
    ) -> list[Any]:
        """Adds tensors over the ranks, as ``sum_across`` does with one tower.

        Args:
          tensors: [N], of the kinds that ``sum_across`` takes.
          names: [N] for messages; ranks must agree on them.
          wire_dtype: as for ``sum_across``.

        Returns:
          [N] sums, the same bits on all ranks.

        Raises:
          ValueError: as ``sum_across``.
          TypeError: as ``sum_across``.
          RankTimeoutError: a rank is missing.
        """
        [sums] = sum_over_ranks(
            [tensors], self._endpoint, wire_dtype=wire_dtype, names=names
        )
        return sums

    def reduce_scatter(self, parts: Sequence[Any], *, name: str) -> Any:
        """Adds each rank's part over the ranks; only that rank gets the sum.

        Args:
          parts: [size] flat tensors of float32 or float64, of known lengths that may
            differ from each other; ``parts[r]`` is added up for rank r.
          name: for messages; ranks must agree on it.

        Returns:
          The sum of all ranks' ``parts[rank]``.

        Raises:
          ValueError: a wrong number of parts, unsupported dtypes, unknown lengths, or
            lengths that differ from those of another rank.
          RankTimeoutError: a rank is missing.
        """
        return reduce_scatter_parts(parts, self._endpoint, name=name)

    def all_gather(self, own: Any, lengths: Sequence[int], *, name: str) -> list[Any]:
        """Returns the flat tensors of all ranks, on every rank.

        Args:
          own: this rank's flat tensor of floats, or integers of 32 and 64 bits, of
            known length.
          lengths: [size], the lengths of all ranks' tensors.
          name: for messages; ranks must agree on it.

        Returns:
          [size] flat tensors, the same bits on all ranks.

        Raises:
          ValueError: a wrong number of lengths, or not the length of ``own``; an
            unsupported dtype; lengths that differ from those of another rank.
          RankTimeoutError: a rank is missing.
        """
        return all_gather_parts(own, lengths, self._endpoint, name=name)

    def all_to_all(self, rows: Any, *, name: str) -> Any:
        """Sends row r to rank r.

        Args:
          rows: [size, n] of floats or integers of 32 and 64 bits, of known shape.
          name: for messages; ranks must agree on it.

        Returns:
          [size, n], each rank's row for this one, in their order.

        Raises:
          ValueError: an unsupported dtype, another number of rows or an unknown shape,
            or a shape that differs from that of another rank.
          RankTimeoutError: a rank is missing.
        """
        return all_to_all_rows(rows, self._endpoint, name=name)

    def broadcast(self, variables: Sequence[Any]) -> None:
        """Sends the values of rank 0's variables to all ranks.

        Args:
          variables: as ``broadcast_variables`` takes them.

        Raises:
          ValueError: as ``broadcast_variables``.
          RankTimeoutError: a rank is missing.
        """
        give_variables(variables, self._endpoint, root=0)

    def tell(self, what: str) -> None:
        """Announces an event of rank 0 to all ranks, without waiting for them.

        Args:
          what: the event's name; each announcement satisfies one wait.
        """
        if self._member is not None:
            self._member.tell(what)

    def wait_for(self, what: str) -> None:
        """Waits until rank 0 has announced an event, once for each call.

        Args:
          what: the event's name.

        Raises:
          RankTimeoutError: a rank is missing, or rank 0 did not announce the event
            within ``stall_timeout_s``.
        """
        self._endpoint.reports.wait_for(what)

    def explain(self, message: str) -> str:
        """Returns an error's message, followed by the missing ranks, if any.

        For programs that do not wrap functions that run collectives in ``bounded``.

        Args:
          message: that of the ``UnavailableError`` that a collective raises when it
            loses a peer or is aborted.
        """
        missing = self._endpoint.reports.find_missing(is_unavailable=True)
        if missing is None or str(missing) in message:
            return message
        return "\n".join([message, str(missing), *missing.__notes__])

    def leave(self, *, timeout_s: float = 5.0) -> None:
        """Leaves the group; a process that ends leaves it automatically.

        Args:
          timeout_s: how long the others may take to complete the last exchange, and
            rank 0 to answer; seconds.
        """
        if sys.exit == self._note_exit:
            sys.exit = self._exit
        self._stop_watching()
        if self._member is not None:
            self._has_lost |= bool(self._member.missing)
            self._member.leave(timeout_s=timeout_s)
        if self._coordinator is not None:
            self._coordinator.stop(timeout_s=timeout_s)
        self._endpoint.reports.forget_member()
        self._coordinator = None

    @property
    def _member(self) -> Member | None:
        return self._endpoint.reports.member

    def _note_exit(self, status: Any = None, /) -> NoReturn:
        """Replaces ``sys.exit``, and notes its status."""
        if threading.current_thread() is threading.main_thread():
            self._exits = status, time.monotonic()
        self._exit(status)

    def _leave_at_exit(self, process: int) -> None:
        """Leaves the group; reports a failure first unless the program ended well."""
        if os.getpid() != process:
            return
        why, _ = self._find_failure()
        if why and self._member is not None:
            self._member.fail(why, timeout_s=2.0)
            self._has_lost = True
        self.leave()

    def _find_failure(self) -> tuple[str, int]:
        """Returns why the program failed, "" if it did not, and its status."""
        error, (status, exited_s) = getattr(sys, "last_value", None), self._exits
        has_gone_on = (
            self._endpoint.reports.moved_s > exited_s + 0.5
        )  # Heartbeats notice progress late.
        if error is not None and not hasattr(sys, "ps1"):  # A prompt survives errors.
            return f"has ended with an exception ({type(error).__name__})", 1
        if status not in (None, 0) and not has_gone_on:
            code = status if isinstance(status, int) else 1
            return "has ended with an error status (sys.exit)", code
        return "", 0

    def _end_mpi(self, process: int) -> None:
        """Ends MPI when the process ends, after this rank has left."""
        mpi = self._endpoint.mpi
        if mpi is not None and os.getpid() == process:
            mpi.end(
                is_lost=self._has_lost,
                status=self._find_failure()[1],
                within_s=self._limits.stall_timeout_s,
            )

    def _stop_watching(self) -> None:
        atexit.unregister(self._leave_at_exit)
        self.has_left = True
        if self._interrupts is not None:
            self._interrupts.close()

    def _forget(self) -> None:
        """Makes a forked child drop everything that belongs to this rank.

        Otherwise it would say goodbye for the rank when it exits, and keep the rank's
        connections open after the rank is killed.
        """
        self._stop_watching()
        for end in (self._member, self._coordinator):
            if end is not None:
                end.close_sockets()
        self._endpoint.reports.forget_member()
        self._coordinator = None


def endpoint_of(group: ProcessGroup) -> Endpoint:
    """Returns a group's endpoint, which exchanges use."""
    return group._endpoint
