"""The group that ``init`` joined, rank queries, and checks of common arguments.

Horovod's functions take no group, so the process has one, which this module holds.
"""

import enum
import logging
import os
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

import tensorflow as tf

from tw_core.checks import caller, check_number, public
from tw_syncrep import _tf_compat
from tw_syncrep.cluster._tf_config import find_tf_config
from tw_syncrep.processes._group import ProcessGroup
from tw_syncrep.processes._joining.joining import join_prepared
from tw_syncrep.processes._side_channel._attendance import Deadlines

_log = logging.getLogger(__name__)
_group: ProcessGroup | None = None
# Variables of Horovod that are read here, and those that its launchers set.
_HEEDED = re.compile(
    r"HOROVOD_(STALL_(CHECK_DISABLE|(CHECK|SHUTDOWN)_TIME_SECONDS)|START_TIMEOUT|"
    r"(LOCAL_|CROSS_)?(RANK|SIZE))"
)


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
    """A set of ranks; the only one is ``global_process_set``, of all ranks."""

    process_set_id: int | None = None

    @public
    def __init__(self, ranks_or_comm: Any) -> None:
        """Refuses, as there are no other sets.

        Args:
          ranks_or_comm: a list of ranks or an MPI communicator, as in Horovod.

        Raises:
          NotImplementedError: always.
        """
        _refuse(f"collectives are of all ranks; got {ranks_or_comm!r}")

    @property
    def ranks(self) -> list[int]:
        """All ranks."""
        return list(range(size()))

    def size(self) -> int:
        """Returns the number of its ranks."""
        return size()

    def rank(self) -> int:
        """Returns this process's rank in it."""
        return rank()

    def included(self) -> bool:
        """Returns True: every process belongs to it."""
        return True

    def __repr__(self) -> str:
        """Returns its name."""
        return "global_process_set"


global_process_set = ProcessSet.__new__(ProcessSet)
global_process_set.process_set_id = 0


@public
def init(
    comm: Any = None, process_sets: Any = None, *, stall_timeout_s: float | None = None
) -> None:
    """Joins the other processes; call it before TensorFlow is used.

    The launcher of the processes is found as by ``processes.join()``: ``tw-launch``,
    ``mpirun``, ``srun``, ``torchrun`` and others; without one, a process is alone. If
    there are several, each sees one GPU of its machine from then
    on, that of its local rank, unless another was chosen before. TensorFlow's runtime
    starts later, with its first op, and accepts settings until then. After the first
    call, ``init`` does nothing.

    Args:
      comm: None.
      process_sets: None, or an empty list.
      stall_timeout_s: seconds that a responsive rank may keep the others waiting, e.g.
        while it evaluates, before they raise. None for the environment variable
        ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``, and 600 if that is 0 or not set. All
        warn of such a rank after ``HOROVOD_STALL_CHECK_TIME_SECONDS``, 60 by default,
        unless ``HOROVOD_STALL_CHECK_DISABLE`` is 1. ``HOROVOD_START_TIMEOUT`` is the
        number of seconds in which all ranks must join, 300 by default.

    Raises:
      NotImplementedError: a communicator, or process sets.
      StartTimeoutError: ranks did not join; they are named.
      RuntimeError: TensorFlow has been used already, or ``shutdown`` was called.
      ValueError: ``TF_CONFIG`` is not a cluster of workers only, what the launcher
        says is no group, or a time is not a positive number.
    """
    global _group
    if comm is not None and comm != []:
        _refuse(f"comm: all processes that were started are one group; {comm!r}")
    if process_sets is not None and process_sets != []:
        _refuse(f"process_sets: collectives are of all ranks; {process_sets!r}")
    if stall_timeout_s is not None:
        check_number(above=0.0, stall_timeout_s=stall_timeout_s)
    if _group is None:
        stall_s = stall_timeout_s or _read_seconds(
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 600.0
        )
        warning_s = _read_seconds("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0)
        if _read_seconds("HOROVOD_STALL_CHECK_DISABLE", 0.0):
            warning_s = stall_s
        _refuse_servers()
        _group = join_prepared(
            lambda local_rank: pin_gpu(tf.config.experimental, local_rank),
            Deadlines(60.0, stall_s, stall_s, warning_s),
            start_timeout_s=_read_seconds("HOROVOD_START_TIMEOUT", 300.0),
        )
        if _group.rank == 0:
            _name_ignored()
        if _group.size > 1:
            _tf_compat.explain_unavailable(_group.explain)


def _refuse_servers() -> None:
    task = find_tf_config()
    if task is not None and task.addresses.get("ps"):
        raise ValueError(
            "init: TF_CONFIG has parameter servers, and Horovod's programs have none; "
            "start them with `tw-launch --horovod -np N -- COMMAND`, which is "
            "`tw-launch --ps 0 --workers N`."
        )


def _name_ignored() -> None:
    """Logs the variables of Horovod that are set and change nothing here."""
    ours = (name for name in os.environ if name.startswith("HOROVOD_"))
    if ignored := sorted(name for name in ours if not _HEEDED.fullmatch(name)):
        _log.warning("init: these change nothing here: %s.", ", ".join(ignored))


def _read_seconds(variable: str, default_s: float) -> float:
    """Reads a Horovod environment variable, 0 for the default."""
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
    return seconds or default_s


def pin_gpu(config: Any, local_rank: int) -> None:
    """Leaves a process the GPU of its local rank, with memory growth.

    ``config`` is ``tf.config.experimental``, before the runtime has started. Programs
    do this after ``init`` and may choose otherwise; where one chooses nothing, each
    process would take all GPUs.
    """
    gpus = config.list_physical_devices("GPU")
    if all(config.get_memory_growth(gpu) is None for gpu in gpus):
        for gpu in gpus:
            config.set_memory_growth(gpu, True)
    # If a launcher gives each process its own GPUs, there are fewer than local ranks.
    if local_rank < len(gpus) and config.get_visible_devices("GPU") == gpus:
        config.set_visible_devices(gpus[local_rank], "GPU")


def shutdown() -> None:
    """Leaves the other processes; a process also leaves when it ends.

    If there are several processes, none can ``init`` again afterwards.
    """
    global _group
    if _group is not None:
        _group.leave()
        _group = None


def is_initialized() -> bool:
    """Returns whether ``init`` was called, without ``shutdown`` since."""
    return _group is not None


def find_group(process_set: Any = global_process_set) -> ProcessGroup:
    """Returns the group that ``init`` joined, which is the only process set."""
    if process_set is not global_process_set:
        _refuse(f"process_set must be global_process_set; got {process_set!r}")
    if _group is None:
        raise ValueError(
            f"{caller()}: hvd.init() has not been called; call it once, before "
            "anything else uses TensorFlow."
        )
    return _group


@public
def size() -> int:
    """Returns the number of processes."""
    return find_group().size


@public
def rank() -> int:
    """Returns this process's index among all, from 0."""
    return find_group().rank


@public
def local_size() -> int:
    """Returns the number of processes on this machine."""
    return find_group().local_size


@public
def local_rank() -> int:
    """Returns this process's index among those of its machine, from 0."""
    return find_group().local_rank


@public
def cross_size() -> int:
    """Returns the number of machines that have a process of this local rank."""
    return len(_find_peers())


@public
def cross_rank() -> int:
    """Returns this machine's index among those that ``cross_size`` counts, from 0."""
    group = find_group()
    return _find_peers().index(group.node_ranks[group.rank])


@public
def is_homogeneous() -> bool:
    """Returns whether every machine has the same number of processes."""
    counts = Counter(find_group().node_ranks)
    return len(set(counts.values())) == 1


@public
def rank_op(name: str | None = None) -> tf.Tensor:
    """Returns ``rank()`` as an int32 tensor of shape []."""
    return tf.constant(find_group().rank, tf.int32, name=name or "rank")


@public
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns ``local_rank()`` as an int32 tensor of shape []."""
    own = find_group().local_rank
    return tf.constant(own, tf.int32, name=name or "local_rank")


@public
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns ``size()`` as an int32 tensor of shape []."""
    _check_set_id(process_set_id)
    return tf.constant(find_group().size, tf.int32, name=name or "size")


@public
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns ``local_size()`` as an int32 tensor of shape []."""
    own = find_group().local_size
    return tf.constant(own, tf.int32, name=name or "local_size")


@public
def process_set_included_op(
    process_set_id: int = 0, name: str | None = None
) -> tf.Tensor:
    """Returns 1, int32 []: every process belongs to the global process set."""
    _check_set_id(process_set_id)
    find_group()
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
    """Returns False: this package has no native library."""
    return False


def rocm_built() -> bool:
    """Returns False: this package has no native library."""
    return False


@public
def add_process_set(process_set: Any) -> NoReturn:
    """Refuses: collectives always involve all ranks."""
    _refuse(f"collectives are of all ranks; got {process_set!r}")


@public
def remove_process_set(process_set: Any) -> NoReturn:
    """Refuses: there are no process sets to remove."""
    _refuse(f"collectives are of all ranks; got {process_set!r}")


@public
def start_timeline(file_path: str, mark_cycles: bool = False) -> NoReturn:
    """Refuses: ``tf.profiler.experimental.start`` records collectives too."""
    _refuse("use tf.profiler.experimental.start(logdir)")


@public
def stop_timeline() -> NoReturn:
    """Refuses: ``tf.profiler.experimental.stop`` ends a recording."""
    _refuse("use tf.profiler.experimental.stop()")


def check_op(op: Any, among: Sequence[ReduceOp]) -> ReduceOp:
    """Returns ``op`` as a reduction, which must be in ``among``."""
    known = ", ".join(member.name for member in among)
    try:
        found = ReduceOp(op)
    except ValueError:
        raise ValueError(
            f"{caller()}: op must be one of {known}; got {op!r}."
        ) from None
    if found not in among:
        _refuse(f"op must be one of {known}; got {found.name}")
    return found


def choose_op(op: Any, average: bool | None) -> ReduceOp:
    """Returns the reduction given by ``op``, or by Horovod's older ``average``."""
    if average is None:
        return check_op(Average if op is None else op, ALL_OPS)
    if op is not None:
        raise ValueError(
            f"{caller()}: op and average say the same; got op={op!r} and "
            f"average={average!r}, pass op alone."
        )
    warnings.warn(
        f"{caller()}: average is deprecated; pass op=hvd.Average or op=hvd.Sum.",
        DeprecationWarning,
        stacklevel=5,
    )
    return Average if average else Sum


ALL_OPS = (Average, Sum, Min, Max, Product)


def _find_peers() -> list[int]:
    """Returns the machines that have a process of this local rank."""
    group = find_group()
    counts = Counter(group.node_ranks)
    return sorted(node for node, n in counts.items() if n > group.local_rank)


def _check_set_id(process_set_id: int) -> None:
    if process_set_id != 0:
        _refuse(f"process_set_id must be 0; got {process_set_id!r}")


def _refuse(why: str) -> NoReturn:
    raise NotImplementedError(
        f"{caller()}: not supported by tw_syncrep.horovod: {why}."
    )
