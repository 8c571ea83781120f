"""The group that ``init`` joined.

Horovod's functions take no group, so the process has one, which this module holds.
"""

import logging
import os
import re
from typing import Any, NoReturn

import tensorflow as tf

from tw_core.internal import check_number
from tw_horovod import _tf_compat
from tw_launch import find_tf_config
from tw_ranks import ProcessGroup
from tw_ranks.internal import Deadlines, Endpoint, endpoint_of, join_prepared

_log = logging.getLogger(__name__)
_group: ProcessGroup | None = None
# Variables of Horovod that are read here, and those that its launchers set.
_HEEDED = re.compile(
    r"HOROVOD_(STALL_(CHECK_DISABLE|(CHECK|SHUTDOWN)_TIME_SECONDS)|START_TIMEOUT|"
    r"(LOCAL_|CROSS_)?(RANK|SIZE))"
)


class ProcessSet:
    """A set of ranks; the only one is ``global_process_set``, of all ranks."""

    process_set_id: int | None = None

    def __init__(self, ranks_or_comm: Any) -> None:
        """Refuses, as there are no other sets.

        Args:
          ranks_or_comm: a list of ranks or an MPI communicator, as in Horovod.

        Raises:
          NotImplementedError: always.
        """
        refuse(f"collectives always involve all ranks; got {ranks_or_comm!r}")

    @property
    def ranks(self) -> list[int]:
        """All ranks."""
        return list(range(find_group().size))

    def size(self) -> int:
        """Returns the number of its ranks."""
        return find_group().size

    def rank(self) -> int:
        """Returns this process's rank in it."""
        return find_group().rank

    def included(self) -> bool:
        """Returns True: every process belongs to it."""
        return True

    def __repr__(self) -> str:
        """Returns its name."""
        return "global_process_set"


global_process_set = ProcessSet.__new__(ProcessSet)
global_process_set.process_set_id = 0


def init(
    comm: Any = None, process_sets: Any = None, *, stall_timeout_s: float | None = None
) -> None:
    """Joins the other processes; call it before TensorFlow is used.

    The launcher of the processes is found as by ``tw_ranks.join()``: ``tw-launch``,
    ``mpirun``, ``srun``, ``torchrun`` and others; without one, a process is alone. If
    there are several processes, each sees one GPU of its machine from then on, that of
    its local rank, unless another was chosen before. TensorFlow's runtime starts later,
    with its first op, and accepts settings until then. After the first call, ``init``
    does nothing.

    Args:
      comm: None.
      process_sets: None, or an empty list.
      stall_timeout_s: seconds that a responsive rank may keep the others waiting, e.g.
        while it evaluates, before they raise. None for the environment variable
        ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``, and 600 if that is 0 or not set. All
        log a warning about such a rank after ``HOROVOD_STALL_CHECK_TIME_SECONDS``, 60
        by default, unless ``HOROVOD_STALL_CHECK_DISABLE`` is 1.
        ``HOROVOD_START_TIMEOUT`` is the number of seconds within which all ranks must
        join, 300 by default.

    Raises:
      NotImplementedError: a communicator, or process sets.
      StartTimeoutError: ranks did not join; they are named.
      RuntimeError: TensorFlow has been used already, or ``shutdown`` was called.
      ValueError: ``TF_CONFIG`` is not a cluster of workers only, the launcher's
        variables do not describe a group, or a time is not a positive number.
    """
    global _group
    if comm is not None and comm != []:
        refuse(f"comm: all processes of a run are one group; got {comm!r}")
    if process_sets is not None and process_sets != []:
        refuse(f"process_sets: collectives involve all ranks; got {process_sets!r}")
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
            "init: TF_CONFIG has parameter servers, but Horovod programs have none; "
            "start them with `tw-launch --horovod -np N -- COMMAND`, which is "
            "`tw-launch -n N`."
        )


def _name_ignored() -> None:
    """Logs the variables of Horovod that are set but have no effect here."""
    ours = (name for name in os.environ if name.startswith("HOROVOD_"))
    if ignored := sorted(name for name in ours if not _HEEDED.fullmatch(name)):
        _log.warning("init: these have no effect here: %s.", ", ".join(ignored))


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
    do this after ``init`` and may choose otherwise; if one chose nothing, each process
    would take all GPUs.
    """
    gpus = config.list_physical_devices("GPU")
    if all(config.get_memory_growth(gpu) is None for gpu in gpus):
        for gpu in gpus:
            config.set_memory_growth(gpu, True)
    # If a launcher gives each process its own GPUs, there are fewer than local ranks.
    if local_rank < len(gpus) and config.get_visible_devices("GPU") == gpus:
        config.set_visible_devices(gpus[local_rank], "GPU")


def shutdown() -> None:
    """Leaves the group; a process that ends leaves it automatically.

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
        refuse(f"process_set must be global_process_set; got {process_set!r}")
    if _group is None:
        raise ValueError(
            "hvd.init() has not been called; call it once, before anything else uses "
            "TensorFlow."
        )
    return _group


def find_endpoint(process_set: Any = global_process_set) -> Endpoint:
    """Returns the group's endpoint, which exchanges use."""
    return endpoint_of(find_group(process_set))


def refuse(why: str) -> NoReturn:
    """Refuses a part of Horovod that is not supported."""
    raise NotImplementedError(f"Not supported by tw_horovod: {why}.")
