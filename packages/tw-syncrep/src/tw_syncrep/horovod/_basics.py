"""Who this process is: the group that ``init`` joined, and what was asked for.

Horovod's functions take no group, so the process has one, which this module holds.
"""

import enum
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

import tensorflow as tf

from tw_core.checks import check_number
from tw_syncrep import _tf_compat
from tw_syncrep.processes._group import ProcessGroup
from tw_syncrep.processes._joining import join_prepared

_group: ProcessGroup | None = None


class ReduceOp(enum.IntEnum):
    """How tensors of all ranks are combined; the numbers are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product


class ProcessSet:
    """A set of ranks: of all of them, ``global_process_set``, and no other."""

    process_set_id: int | None = None

    def __init__(self, ranks_or_comm: Any) -> None:
        """Refuses to be made.

        Raises:
          NotImplementedError: always.
        """
        _refuse("ProcessSet", f"collectives are of all ranks; got {ranks_or_comm!r}")

    @property
    def ranks(self) -> list[int]:
        """All ranks."""
        return list(range(size()))

    def size(self) -> int:
        """Returns how many ranks it has."""
        return size()

    def rank(self) -> int:
        """Returns this process's rank in it."""
        return rank()

    def included(self) -> bool:
        """Returns True: every process belongs to it."""
        return True

    def __repr__(self) -> str:
        """Names it."""
        return "global_process_set"


global_process_set = ProcessSet.__new__(ProcessSet)
global_process_set.process_set_id = 0


def init(
    comm: Any = None, process_sets: Any = None, *, stall_timeout_s: float | None = None
) -> None:
    """Joins the other processes; call it before TensorFlow is used.

    Who they are is read from ``TF_CONFIG``, which ``tw-launch`` sets; a process for
    which it is not set is alone. Each of several sees one GPU of its machine from then
    on, that of its local rank, unless another was chosen before. TensorFlow's runtime
    starts later, with its first op, and takes settings until then. After the first call
    ``init`` does nothing.

    Args:
      comm: None.
      process_sets: None, or an empty list.
      stall_timeout_s: how long a rank that answers may keep the others waiting, e.g.
        while it evaluates, before they raise; seconds. None for the environment
        variable ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``, and 600 where that is 0 or not
        set. All warn of such a rank after ``HOROVOD_STALL_CHECK_TIME_SECONDS``, 60 by
        default.

    Raises:
      NotImplementedError: a communicator, or process sets.
      StartTimeoutError: ranks did not come; they are named.
      RuntimeError: TensorFlow has been used already, or ``shutdown`` was called.
      ValueError: ``TF_CONFIG`` is no cluster of workers alone, or a time is no positive
        number.
    """
    global _group
    if comm is not None and comm != []:
        _refuse(
            "init", f"comm: all processes that were started are one group; {comm!r}"
        )
    if process_sets is not None and process_sets != []:
        _refuse("init", f"process_sets: collectives are of all ranks; {process_sets!r}")
    if stall_timeout_s is not None:
        check_number("init", above=0.0, stall_timeout_s=stall_timeout_s)
    if _group is None:
        if stall_timeout_s is None:
            stall_timeout_s = _read_seconds("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
        _group = join_prepared(
            lambda group: pin_gpu(tf.config.experimental, group.local_rank),
            first_timeout_s=stall_timeout_s or 600.0,
            stall_timeout_s=stall_timeout_s or 600.0,
            warning_s=_read_seconds("HOROVOD_STALL_CHECK_TIME_SECONDS"),
        )
        if _group.size > 1:
            _tf_compat.explain_unavailable(_group.explain)


def _read_seconds(variable: str) -> float | None:
    """Reads an environment variable of Horovod's; None where it is 0 or not set."""
    text = os.environ.get(variable) or "0"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise ValueError(
            f"init: {variable} must be a number of seconds, 0 for the default; got "
            f"{text!r}."
        )
    return seconds or None


def pin_gpu(config: Any, local_rank: int) -> None:
    """Leaves a process the GPU of its local rank, whose memory grows as it is needed.

    Programs do so after ``init`` and may choose otherwise; where one chooses nothing,
    each process would take all GPUs.

    Args:
      config: ``tf.config.experimental``, before the runtime has started.
      local_rank: of the process.
    """
    gpus = config.list_physical_devices("GPU")
    if all(config.get_memory_growth(gpu) is None for gpu in gpus):
        for gpu in gpus:
            config.set_memory_growth(gpu, True)
    # A launcher that gives each process its own GPUs leaves fewer than local ranks.
    if local_rank < len(gpus) and config.get_visible_devices("GPU") == gpus:
        config.set_visible_devices(gpus[local_rank], "GPU")


def shutdown() -> None:
    """Leaves the other processes; a process leaves by itself when it ends.

    Of several processes none can ``init`` again afterwards.
    """
    global _group
    if _group is not None:
        _group.leave()
        _group = None


def is_initialized() -> bool:
    """Returns whether ``init`` was called, and ``shutdown`` not since."""
    return _group is not None


def find_group(caller: str) -> ProcessGroup:
    """Returns the group that ``init`` joined.

    Args:
      caller: the public name that was called, for the message.

    Raises:
      ValueError: there is none.
    """
    if _group is None:
        raise ValueError(
            f"{caller}: hvd.init() has not been called; call it once, before anything "
            "else uses TensorFlow."
        )
    return _group


def size() -> int:
    """Returns how many processes there are."""
    return find_group("size").size


def rank() -> int:
    """Returns this process's number among all, from 0."""
    return find_group("rank").rank


def local_size() -> int:
    """Returns how many processes there are on this machine."""
    return find_group("local_size").local_size


def local_rank() -> int:
    """Returns this process's number among those of its machine, from 0."""
    return find_group("local_rank").local_rank


def cross_size() -> int:
    """Returns how many machines have a process of this local rank."""
    return len(_find_peers("cross_size"))


def cross_rank() -> int:
    """Returns this machine's number among those that ``cross_size`` counts, from 0."""
    group = find_group("cross_rank")
    return _find_peers("cross_rank").index(group.node_ranks[group.rank])


def is_homogeneous() -> bool:
    """Returns whether every machine has the same number of processes."""
    counts = Counter(find_group("is_homogeneous").node_ranks)
    return len(set(counts.values())) == 1


def rank_op(name: str | None = None) -> tf.Tensor:
    """Returns ``rank()`` as an int32 tensor of shape []."""
    return tf.constant(find_group("rank_op").rank, tf.int32, name=name or "rank")


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns ``local_rank()`` as an int32 tensor of shape []."""
    own = find_group("local_rank_op").local_rank
    return tf.constant(own, tf.int32, name=name or "local_rank")


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns ``size()`` as an int32 tensor of shape []."""
    _check_set_id("size_op", process_set_id)
    return tf.constant(find_group("size_op").size, tf.int32, name=name or "size")


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns ``local_size()`` as an int32 tensor of shape []."""
    own = find_group("local_size_op").local_size
    return tf.constant(own, tf.int32, name=name or "local_size")


def process_set_included_op(
    process_set_id: int = 0, name: str | None = None
) -> tf.Tensor:
    """Returns 1, int32 []: every process belongs to the global process set."""
    _check_set_id("process_set_included_op", process_set_id)
    find_group("process_set_included_op")
    return tf.constant(1, tf.int32, name=name or "process_set_included")


def mpi_threads_supported() -> bool:
    """Returns False: there is no MPI. Horovod without MPI raises ValueError."""
    return False


def mpi_enabled() -> bool:
    """Returns False: there is no MPI."""
    return False


def mpi_built() -> bool:
    """Returns False: there is no MPI."""
    return False


def gloo_enabled() -> bool:
    """Returns False: there is no Gloo."""
    return False


def gloo_built() -> bool:
    """Returns False: there is no Gloo."""
    return False


def nccl_built() -> int:
    """Returns 0: TensorFlow's collectives use gRPC here, on GPUs too."""
    return 0


def ddl_built() -> bool:
    """Returns False: there is no DDL."""
    return False


def ccl_built() -> bool:
    """Returns False: there is no oneCCL."""
    return False


def cuda_built() -> bool:
    """Returns False: there is no library of our own."""
    return False


def rocm_built() -> bool:
    """Returns False: there is no library of our own."""
    return False


def add_process_set(process_set: Any) -> NoReturn:
    """Refuses: collectives are of all ranks.

    Raises:
      NotImplementedError: always.
    """
    _refuse("add_process_set", f"collectives are of all ranks; got {process_set!r}")


def remove_process_set(process_set: Any) -> NoReturn:
    """Refuses: there are no process sets to remove.

    Raises:
      NotImplementedError: always.
    """
    _refuse("remove_process_set", f"collectives are of all ranks; got {process_set!r}")


def start_timeline(file_path: str, mark_cycles: bool = False) -> NoReturn:
    """Refuses: ``tf.profiler.experimental.start`` records collectives too.

    Raises:
      NotImplementedError: always.
    """
    _refuse("start_timeline", "use tf.profiler.experimental.start(logdir)")


def stop_timeline() -> NoReturn:
    """Refuses: ``tf.profiler.experimental.stop`` ends what records collectives too.

    Raises:
      NotImplementedError: always.
    """
    _refuse("stop_timeline", "use tf.profiler.experimental.stop()")


def check_process_set(caller: str, process_set: Any) -> None:
    """Refuses every process set but the global one.

    Args:
      caller: the public name that was called, for the message.
      process_set: what it was given.

    Raises:
      NotImplementedError: another one.
    """
    if process_set is not global_process_set:
        _refuse(caller, f"process_set must be global_process_set; got {process_set!r}")


def check_op(caller: str, op: Any, among: Sequence[ReduceOp]) -> ReduceOp:
    """Returns a reduction that is among those which a function knows.

    Args:
      caller: the public name that was called, for the message.
      op: what it was given.
      among: what it knows.

    Raises:
      NotImplementedError: Adasum, or one that it does not know.
      ValueError: no reduction at all.
    """
    known = ", ".join(member.name for member in among)
    try:
        found = ReduceOp(op)
    except ValueError:
        raise ValueError(f"{caller}: op must be one of {known}; got {op!r}.") from None
    if found not in among:
        _refuse(caller, f"op must be one of {known}; got {found.name}")
    return found


def choose_op(caller: str, op: Any, average: bool | None) -> ReduceOp:
    """Returns the reduction that is meant, of the old and the new argument.

    Args:
      caller: the public name that was called, for the message.
      op: None for what ``average`` says.
      average: Horovod's older argument.

    Raises:
      NotImplementedError: Adasum.
      ValueError: both are given, or ``op`` is no reduction.
    """
    if average is None:
        return check_op(caller, Average if op is None else op, ALL_OPS)
    if op is not None:
        raise ValueError(
            f"{caller}: op and average say the same; got op={op!r} and "
            f"average={average!r}, pass op alone."
        )
    warnings.warn(
        f"{caller}: average is deprecated; pass op=hvd.Average or op=hvd.Sum.",
        DeprecationWarning,
        stacklevel=4,
    )
    return Average if average else Sum


ALL_OPS = (Average, Sum, Min, Max, Product)


def _find_peers(caller: str) -> list[int]:
    """Returns the machines that have a process of this local rank."""
    group = find_group(caller)
    counts = Counter(group.node_ranks)
    return sorted(node for node, n in counts.items() if n > group.local_rank)


def _check_set_id(caller: str, process_set_id: int) -> None:
    if process_set_id != 0:
        _refuse(caller, f"process_set_id must be 0; got {process_set_id!r}")


def _refuse(caller: str, why: str) -> NoReturn:
    raise NotImplementedError(f"{caller}: not supported by tw_syncrep.horovod: {why}.")
