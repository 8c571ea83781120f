"""Queries about the group: ranks, sizes, and the libraries that are built in."""

from collections import Counter
from typing import Any, NoReturn

import tensorflow as tf

from tw_horovod._state.group import find_group, refuse


def size() -> int:
    """Returns the number of processes."""
    return find_group().size


def rank() -> int:
    """Returns this process's index among all, from 0."""
    return find_group().rank


def local_size() -> int:
    """Returns the number of processes on this machine."""
    return find_group().local_size


def local_rank() -> int:
    """Returns this process's index among those of its machine, from 0."""
    return find_group().local_rank


def cross_size() -> int:
    """Returns the number of machines that have a process of this local rank."""
    return len(_find_peers())


def cross_rank() -> int:
    """Returns this machine's index among those that ``cross_size`` counts, from 0."""
    group = find_group()
    return _find_peers().index(group.node_ranks[group.rank])


def is_homogeneous() -> bool:
    """Returns whether every machine has the same number of processes."""
    counts = Counter(find_group().node_ranks)
    return len(set(counts.values())) == 1


def rank_op(name: str | None = None) -> tf.Tensor:
    """Returns ``rank()`` as an int32 tensor of shape []."""
    return tf.constant(find_group().rank, tf.int32, name=name or "rank")


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns ``local_rank()`` as an int32 tensor of shape []."""
    own = find_group().local_rank
    return tf.constant(own, tf.int32, name=name or "local_rank")


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns ``size()`` as an int32 tensor of shape []."""
    _check_set_id(process_set_id)
    return tf.constant(find_group().size, tf.int32, name=name or "size")


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns ``local_size()`` as an int32 tensor of shape []."""
    own = find_group().local_size
    return tf.constant(own, tf.int32, name=name or "local_size")


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


def add_process_set(process_set: Any) -> NoReturn:
    """Refuses: collectives always involve all ranks."""
    refuse(f"collectives always involve all ranks; got {process_set!r}")


def remove_process_set(process_set: Any) -> NoReturn:
    """Refuses: there are no process sets to remove."""
    refuse(f"collectives always involve all ranks; got {process_set!r}")


def start_timeline(file_path: str, mark_cycles: bool = False) -> NoReturn:
    """Refuses: ``tf.profiler.experimental.start`` records collectives too."""
    refuse("use tf.profiler.experimental.start(logdir)")


def stop_timeline() -> NoReturn:
    """Refuses: ``tf.profiler.experimental.stop`` ends a recording."""
    refuse("use tf.profiler.experimental.stop()")


def _find_peers() -> list[int]:
    """Returns the machines that have a process of this local rank."""
    group = find_group()
    counts = Counter(group.node_ranks)
    return sorted(node for node, n in counts.items() if n > group.local_rank)


def _check_set_id(process_set_id: int) -> None:
    if process_set_id != 0:
        refuse(f"process_set_id must be 0; got {process_set_id!r}")
