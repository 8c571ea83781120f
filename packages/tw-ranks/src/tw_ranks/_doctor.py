"""This package's part of ``tw-doctor``, which finds it by an entry point."""

from tw_ranks._joining.joining import find_engine, is_on_one_machine


def describe_engine() -> str:
    """Describes this process's engine of exchanges, or raises as ``join`` does."""
    chosen, size = find_engine()
    said = f"{chosen.name}, as {chosen.reason}; {size} ranks"
    if chosen.name != "tensorflow" or size == 1 or not is_on_one_machine():
        return said
    return (
        f"{said}; on one machine MPI's shared memory is several times faster for large "
        "tensors: `pip install mpi4py mpich`, then `tw-launch --mpi`"
    )
