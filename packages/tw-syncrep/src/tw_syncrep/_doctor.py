"""This package's part of ``tw-doctor``, which finds it by an entry point."""

import warnings

from tw_syncrep.cluster import is_exposed, read_tf_config
from tw_syncrep.processes._joining.joining import find_engine, is_on_one_machine


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
        return f"{said}; whether others reach {task.address} is unknown"
    state = "something listens there for other machines" if is_open else "not open now"
    return f"{said}; {task.address}: {state}"


def describe_engine() -> str:
    """Describes what carries the exchanges of this process, or raises as ``join``."""
    chosen, size = find_engine()
    said = f"{chosen.name}, as {chosen.reason}; {size} ranks"
    if chosen.name != "tensorflow" or size == 1 or not is_on_one_machine():
        return said
    return (
        f"{said}; on one machine MPI's shared memory is several times faster for large "
        "tensors: `pip install mpi4py mpich`, then `tw-launch --mpi`"
    )
