"""This package's part of ``tw-doctor``, which finds it by an entry point."""

import warnings

from tw_syncrep.cluster import TaskConfig, is_exposed, read_tf_config
from tw_syncrep.processes._joining.joining import find_engine


def describe_tf_config() -> str:
    """Describes this process's task, or raises as ``read_tf_config`` does."""
    task = read_tf_config()
    said = f"task {task.job}:{task.index} of {dict(task.addresses)}"
    if task.address is None:
        return said
    with warnings.catch_warnings(record=True) as unknown:
        warnings.simplefilter("always")
        is_open = is_exposed(int(task.address.rsplit(":", 1)[1]))
    if unknown:
        state = f"whether others reach {task.address} is unknown"
    elif is_open:
        state = f"{task.address}: something listens there for other machines"
    else:
        state = f"{task.address}: not open now"
    return f"{said}; {state}{_advise_mpi(task)}"


def describe_engine() -> str:
    """Describes what carries the exchanges of this process, or raises as ``join``."""
    chosen, size = find_engine()
    return f"{chosen.name}, as {chosen.reason}; {size} ranks"


def _advise_mpi(task: TaskConfig) -> str:
    """Returns advice for workers of one machine that exchange sums by TensorFlow."""
    addresses = [address for listed in task.addresses.values() for address in listed]
    hosts = {address.rsplit(":", 1)[0] for address in addresses}
    is_ring = len(addresses) > 1 and len(hosts) == 1 and not task.addresses.get("ps")
    if not is_ring or find_engine()[0].name == "mpi":
        return ""
    return (
        "; its processes add gradients over sockets: MPI's shared memory is several "
        "times faster for large ones (pip install mpi4py mpich, then "
        "tw-launch --mpi)"
    )
