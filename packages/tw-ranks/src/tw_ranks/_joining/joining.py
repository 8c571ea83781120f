"""Joining: finds this process's rank and addresses, and waits for all ranks."""

import contextlib
import functools
import hashlib
import logging
import os
import platform
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import tensorflow as tf

from tw_core.internal import (
    Recorder,
    Wait,
    add_report,
    check_number,
    check_text,
    check_whole_number,
)
from tw_launch import find_tf_config
from tw_launch.internal import (
    check_key,
    draw_key,
    find_key,
    find_unreachable,
    hold_free_ports,
    hold_port,
    is_loopback,
    join_address,
    keep_freed_memory,
    listen,
    may_pass,
    server_config,
    split_address,
    wait_for_port,
    warn_if_exposed,
)
from tw_ranks import _tf_compat
from tw_ranks._engines.choice import Engine, EngineFacts, choose_engine
from tw_ranks._engines.mpi import EndedError, MpiEngine
from tw_ranks._errors import StartTimeoutError
from tw_ranks._group import ProcessGroup
from tw_ranks._joining.layout import find_layout_fault
from tw_ranks._joining.seats import Seat, find_seat
from tw_ranks._side_channel._attendance import Deadlines
from tw_ranks._side_channel._connections import allow_connections
from tw_ranks._side_channel._coordinator import Coordinator
from tw_ranks._side_channel._introduction import (
    Introduction,
    find_local_ranks,
    find_run,
)
from tw_ranks._side_channel._member import AbsentError, Member

_log = logging.getLogger(__name__)
_WITHOUT_KEY = (
    "join: rank 0 listens at %s without a key: any program that can connect there can "
    "take a rank, learn addresses and versions, and end the run. Give all ranks one "
    "key, by the environment variable TW_KEY (`export TW_KEY=$(openssl rand -hex 16)` "
    "in a job's script) or by key=."
)
_joined: "weakref.ref[ProcessGroup] | None" = None


def join(
    coordinator: str | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    engine: Literal["auto", "tensorflow", "nccl", "mpi"] = "auto",
    timeout_s: float = 60.0,
    first_timeout_s: float = 600.0,
    start_timeout_s: float = 300.0,
    stall_timeout_s: float = 600.0,
    bucket_bytes: int | None = None,
    key: str | None = None,
) -> ProcessGroup:
    """Joins the processes that train together; call it before TensorFlow is used.

    Without arguments, rank, size and rank 0's address are those that the launcher of
    this process gave it: the environment variable ``TF_CONFIG``, as ``tw-launch -n 2``
    and Ray set it, whose chief and workers are the ranks in this order; or else
    ``torchrun``, ``horovodrun``, MPI's ``mpiexec``, Slurm's ``srun``, RANK and
    WORLD_SIZE, Kubeflow's Trainer, or an Indexed Job of Kubernetes, the first of these
    that has started the process. The log says which, and which others it overrides. If
    the launcher gives no port, rank 0 listens at one of 20,000 to 28,999, derived from
    the job's id. Without a launcher the process is alone: a group of one, in which
    every sum equals its input.

    TensorFlow's runtime starts with its first op, or with the first exchange. Until
    then it accepts settings, such as threads, logical devices and visible GPUs.

    Args:
      coordinator: "host:port" at which rank 0 listens, unless ``TW_LISTEN`` has another
        host. A rank's own server listens at a free port of the host from which the rank
        reaches that address.
      rank: this process's rank, from 0.
      size: number of ranks.
      engine: ``"tensorflow"``, ``"nccl"`` or ``"mpi"``: the library that carries
        exchanges, the same on all ranks; ``"auto"`` chooses one that works here.
      timeout_s: how long a rank may be silent before the others raise, and how long a
        rank that answers may keep them waiting before all log a warning; seconds.
      first_timeout_s: how long ranks wait for each other to describe a new collective;
        if longer, also used as ``stall_timeout_s`` for the first and newly traced ones.
      start_timeout_s: how long ranks have to join.
      stall_timeout_s: how long a rank that answers may keep the others waiting before
        they raise: a process that evaluates or saves is alive. At least ``timeout_s``.
      bucket_bytes: how many bytes of gradients are sent together, the same on all
        ranks. A bucket is sent while the backward pass computes the next. None: 1 MiB
        between machines, and all together on one, where several would take longer, and
        by NCCL.
      key: a secret of this run, the same on all ranks: 22 to 200 characters, such as
        ``openssl rand -hex 16`` prints. Rank 0 admits only ranks that prove to have it,
        and proves it to them. None: the one in the environment variable ``TW_KEY``,
        which ``tw-launch`` sets. Over MPI, rank 0 sends its own to all. Without a
        key rank 0 admits this user's processes on loopback, and any elsewhere, of which
        it warns.

    Returns:
      The group.

    Raises:
      StartTimeoutError: ranks did not join; the error names them. Or this rank's port
        was in use all the time.
      RuntimeError: this process has joined or used TensorFlow already, or TensorFlow's
        server cannot start.
      ValueError: addresses or numbers, passed or the launcher's, do not form a group,
        or it started several processes that would each be alone; they, the versions or
        the engine differ from those of other ranks; another run uses the coordinator's
        address; its host is not rank 0's; or the engine cannot be used here.
      TypeError: an argument has the wrong type.

    >>> import tw_ranks
    >>> group = tw_ranks.join()  # without a launcher
    >>> group.rank, group.size
    (0, 1)
    >>> group.leave()
    """
    check_number(above=0.0, timeout_s=timeout_s)
    check_number(above=0.0, first_timeout_s=first_timeout_s)
    check_number(above=0.0, start_timeout_s=start_timeout_s)
    check_number(above=0.0, stall_timeout_s=stall_timeout_s)
    if bucket_bytes is not None:
        check_whole_number(bucket_bytes=bucket_bytes, at_least=1)
    if key is not None:
        check_text(key=key)
        check_key(key, "join: key")
    limits = Deadlines(timeout_s, first_timeout_s, stall_timeout_s, timeout_s)
    seat = find_seat(coordinator, rank, size, has_mpi4py=_has_mpi4py())
    return join_prepared(
        *(lambda local_rank: None, limits, seat, start_timeout_s),
        engine=engine,
        bucket_bytes=bucket_bytes,
        key=key,
    )


def join_prepared(
    prepare: Callable[[int], None],
    limits: Deadlines,
    seat: Seat | None = None,
    start_timeout_s: float = 300.0,
    *,
    engine: str = "auto",
    bucket_bytes: int | None = None,
    key: str | None = None,
) -> ProcessGroup:
    """Joins as ``join`` does; ``prepare(local_rank)`` precedes TensorFlow's runtime.

    It is not called if this process is alone.
    """
    global _joined
    before = None if _joined is None else _joined()
    if before is not None and not before.has_left:
        raise RuntimeError(
            "join: this process has already joined a group; pass that group on."
        )
    seat = seat or find_seat(has_mpi4py=_has_mpi4py())
    limits = replace(
        limits,
        first_timeout_s=max(limits.timeout_s, limits.first_timeout_s),
        stall_timeout_s=max(limits.timeout_s, limits.stall_timeout_s),
    )
    facts = _find_facts(seat)
    chosen = choose_engine(engine, facts)
    if seat.size == 1:
        alone = _introduce(seat, chosen, bucket_bytes, port=0)
        group = ProcessGroup(
            *([alone], 0, chosen),
            member=None,
            coordinator=None,
            limits=limits,
            bucket_bytes=bucket_bytes,
        )
    else:
        _log.info("join: engine %r, as %s.", chosen.name, chosen.reason)
        group = _join_others(
            *(seat, chosen, limits, start_timeout_s, prepare),
            bucket_bytes=bucket_bytes,
            key=find_key() if key is None else key,
        )
        if seat.rank == 0 and (
            fault := find_layout_fault(chosen, facts, group.node_ranks)
        ):
            _log.warning("join: %s.", fault)
        if chosen.name != "mpi" and seat.rank == 0:  # Once, not in every process.
            # The server starts with the runtime, maybe in a function that AutoGraph
            # converts; the warning should point at the line that joins.
            warn_if_exposed(None, stacklevel=3)
    _joined = weakref.ref(group)
    return group


def find_engine() -> tuple[Engine, int]:
    """Returns the engine that ``join`` would choose now, and the number of ranks."""
    seat = find_seat(has_mpi4py=_has_mpi4py())
    return choose_engine("auto", _find_facts(seat)), seat.size


def is_on_one_machine() -> bool:
    """Returns whether TF_CONFIG has all ranks at one host."""
    task = find_tf_config()
    listed = task.addresses.values() if task is not None else ()
    return len({split_address(one)[0] for own in listed for one in own}) == 1


def _find_facts(seat: Seat) -> EngineFacts:
    return EngineFacts(
        seat.size,
        mpi_launcher=seat.mpi_launcher,
        has_mpi4py=_has_mpi4py(),
        num_gpus=len(tf.config.get_visible_devices("GPU")),
        tensorflow_has_nccl=bool(tf.sysconfig.get_build_info().get("is_cuda_build")),
    )


def _has_mpi4py() -> bool:
    try:  # Not by its module, which may be a stand-in for Horovod's programs.
        return bool(version("mpi4py"))
    except PackageNotFoundError:
        return False


def _join_others(
    seat: Seat,
    engine: Engine,
    limits: Deadlines,
    start_timeout_s: float,
    prepare: Callable[[int], None],
    *,
    bucket_bytes: int | None,
    key: str,
) -> ProcessGroup:
    mpi = _find_mpi(seat) if engine.name == "mpi" else None
    if mpi is None and seat.is_told:
        raise ValueError(
            f"join: {seat.mpi_launcher} has started {seat.size} processes, and only "
            f"MPI can tell them where rank 0 listens, but {engine.reason}. Pass "
            'coordinator, rank and size, or join with engine="mpi".'
        )
    if mpi is None and _tf_compat.has_started():
        raise RuntimeError(
            "join: TensorFlow's runtime has already started in this process, without "
            "the other ranks; join before any code creates a tensor or lists devices."
        )
    end_s = time.monotonic() + start_timeout_s
    with contextlib.ExitStack() as opened:  # closed again if ranks do not join
        unreachable, address = "", seat.coordinator
        held = coordinator = start_runtime = None
        try:
            if mpi is None:  # A port for TensorFlow's server, which starts later.
                held = _open_port(lambda: _hold(seat.port), seat, seat.port, end_s)
                opened.callback(held.close)
            port = held.getsockname()[1] if held else 0
            own = _introduce(seat, engine, bucket_bytes, port=port)
            if seat.rank == 0:
                key = key or (draw_key() if mpi is not None else "")
                listener = _listen(seat, mpi, end_s, key)
                # Other ranks may reach it by an address that it does not have itself.
                address = listener.getsockname()[:2]
                unreachable = _check_reachable(seat, listener)
                if not key and not is_loopback(address[0]):
                    _log.warning(_WITHOUT_KEY, join_address(*address))
                coordinator = Coordinator(listener, seat.size, limits, own=own, key=key)
                opened.callback(coordinator.stop, timeout_s=1.0)
            elif mpi is not None:
                told, key = _hear_address(mpi, end_s)
                address = told if seat.is_told else address
            member = Member(
                *(address, own, limits),
                start_timeout_s=start_timeout_s,
                end_s=end_s,
                key=key,
            )
            opened.callback(member.leave, timeout_s=1.0)
            here = find_local_ranks(member.introductions, seat.rank)
            prepare(here.index(seat.rank))
            if mpi is not None:
                keep_freed_memory()
                _open_mpi(mpi, member)
                if len(here) >= (os.cpu_count() or 1):
                    _tf_compat.sleep_at_once()  # Other ranks need the processors.
            elif held is not None:
                others = [other.address for other in member.introductions]
                _join_cluster(others, seat.rank)
                start_runtime = functools.partial(_start_runtime, seat.rank, held)
            group = ProcessGroup(
                member.introductions,
                seat.rank,
                engine,
                member=member,
                coordinator=coordinator,
                limits=limits,
                bucket_bytes=bucket_bytes,
                start_runtime=start_runtime,
                mpi=mpi,
            )
        except AbsentError as error:
            raise _as_start_error(error, seat, start_timeout_s, unreachable) from None
        except ValueError as error:
            raise ValueError(f"join: {error}.") from None
        opened.pop_all()
        return group


def _listen(seat: Seat, mpi: MpiEngine | None, end_s: float, key: str) -> socket.socket:
    """Opens rank 0's port; over MPI, sends its number and the key to the others."""
    port = seat.coordinator[1]
    listener = _open_port(lambda: listen(*seat.coordinator), seat, port, end_s)
    if mpi is not None:
        mpi.tell_address(seat.host, listener.getsockname()[1], key)
    return listener


def _find_mpi(seat: Seat) -> MpiEngine:
    mpi = MpiEngine()
    if (mpi.rank, mpi.size) != (seat.rank, seat.size):
        raise RuntimeError(
            f"join: this is rank {seat.rank} of {seat.size}, but rank {mpi.rank} of "
            f"{mpi.size} by MPI ({mpi.library}): another MPI than mpi4py's may have "
            "started the processes. Start them with the mpiexec of mpi4py's MPI, or "
            'join with engine="tensorflow".'
        )
    return mpi


def _hear_address(mpi: MpiEngine, end_s: float) -> tuple[tuple[str, int], str]:
    try:
        return mpi.hear_address(end_s)
    except EndedError:
        raise AbsentError("rank 0 did not send its address", (0,)) from None


def _open_mpi(mpi: MpiEngine, member: Member) -> None:
    try:
        mpi.open(lambda: bool(member.missing) or member.has_left)
    except EndedError:
        faults = [f"rank {rank} {why}" for rank, why in member.missing.items()]
        raise AbsentError("; ".join(faults), tuple(member.missing)) from None


def _check_reachable(seat: Seat, listener: socket.socket) -> str:
    """Refuses to listen where no other machine can connect, if there are others.

    If that is unknown, as a name was given, it logs a warning and returns it.
    """
    host = seat.coordinator[0]
    fault = find_unreachable(host, listener, "rank 0")
    if fault and seat.spans_machines:
        listener.close()
        raise ValueError(fault)
    if not fault or is_loopback(host) or os.environ.get("TW_LISTEN"):
        return ""
    _log.warning("join: only ranks on this machine can join: %s.", fault)
    return fault


def _as_start_error(
    error: AbsentError, seat: Seat, start_timeout_s: float, unreachable: str
) -> StartTimeoutError:
    """Returns the error, with its report, for a join without some of the ranks."""
    # Only rank 0 knows which ranks have joined; without it, a rank knows only itself.
    known = {seat.rank} if 0 in error.ranks else set(range(seat.size))
    arrived = sorted(known - set(error.ranks))
    cause = f": {unreachable}" if unreachable else ""
    late = StartTimeoutError(
        f"join: {error}{cause}.",
        waited_s=start_timeout_s,
        arrived=arrived,
        missing=error.ranks,
    )
    wait = Wait(
        who=f"rank {seat.rank}",
        what="all ranks to join",
        waited_s=start_timeout_s,
        deadline_s=start_timeout_s,
        arrived=[f"rank {rank}" for rank in arrived],
        missing={f"rank {rank}": "has not joined" for rank in error.ranks},
    )
    host, port = seat.coordinator
    facts = {"coordinator": join_address(host, port)}
    own = Recorder(f"join, rank {seat.rank} of {seat.size}", facts=facts)
    return add_report(late, wait, own)


def _join_cluster(addresses: Sequence[str], rank: int) -> None:
    listed = {"worker": addresses}
    allow_connections(len(addresses))
    keep_freed_memory()
    settings = server_config(listed, addresses[rank]).experimental
    _tf_compat.join_cluster(
        addresses, rank, sleep_at_once=settings.disable_thread_spinning
    )


def _start_runtime(rank: int, held: socket.socket) -> None:
    """Starts TensorFlow's runtime, whose server takes the port that was held.

    That is when it is first needed, by a function or Keras.
    """
    port = held.getsockname()[1]
    try:
        _tf_compat.start_runtime()
    except tf.errors.UnknownError as error:
        raise RuntimeError(
            f"join: TensorFlow's server of rank {rank} cannot start at port {port}: "
            f"{error.message}."
        ) from error
    held.close()


def _introduce(
    seat: Seat, engine: Engine, bucket_bytes: int | None, *, port: int
) -> Introduction:
    run, start = find_run()
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = [platform.node(), os.environ.get("TW_NODE_RANK", "")]
    with contextlib.suppress(OSError):
        machine.append(boot.read_text().strip())
    address = join_address(seat.host, port) if seat.host else f":{port}"
    return Introduction(
        rank=seat.rank,
        size=seat.size,
        address=address if port else "",
        task=f"{platform.node()}, process {os.getpid()}",
        machine=hashlib.blake2b("/".join(machine).encode(), digest_size=8).hexdigest(),
        versions={
            "Python": ".".join(platform.python_version_tuple()[:2]),
            "TensorFlow": tf.__version__,
            "tw-ranks": version("tw-ranks"),
            "the engine": engine.name,
            "bucket_bytes": str(bucket_bytes or "by default"),
        },
        run=run,
        start=start,
    )


def _hold(port: int | None) -> socket.socket:
    """Reserves a port until this process's server takes it."""
    if port is not None:
        return hold_port(port)
    [held] = hold_free_ports(1).values()
    return held


def _open_port(
    open_: Callable[[], socket.socket], seat: Seat, port: int | None, end_s: float
) -> socket.socket:
    """Opens a port of this rank, waiting while an ending process still holds it."""
    where = join_address(seat.host or "this machine", port or 0)
    why = f"rank {seat.rank} cannot listen at {where}"
    try:
        return wait_for_port(
            open_,
            until_s=end_s,
            tell=lambda error: _log.warning(
                "join waits for up to %.0f s: %s (%s).",
                *(end_s - time.monotonic(), why, error.strerror),
            ),
        )
    except OSError as error:
        why = f"{why}: {error.strerror}"
        if not may_pass(error):
            raise ValueError(why) from None
        advice = "end the program that listens there, or choose another address"
        raise AbsentError(f"{why}; {advice}", (seat.rank,)) from None
