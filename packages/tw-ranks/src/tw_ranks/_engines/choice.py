"""The choice of the library that carries exchanges: from facts, in plain Python.

The engines are TensorFlow's own collectives, over gRPC or NCCL, and MPI.
"""

from dataclasses import dataclass

ENGINES = ("auto", "nccl", "tensorflow", "mpi")


@dataclass(frozen=True)
class EngineFacts:
    """The facts about this process on which the choice depends."""

    size: int  # Number of ranks.
    mpi_launcher: str = ""  # The MPI launcher that started this process; "" if none.
    has_mpi4py: bool = False
    num_gpus: int = 0  # Visible to this process, before one is pinned.
    tensorflow_has_nccl: bool = False


@dataclass(frozen=True)
class Engine:
    """An engine, and why it was chosen."""

    name: str  # "tensorflow", "nccl" or "mpi".
    reason: str
    falls_back: bool = False  # To "tensorflow", if its first sum is not exact.


def choose_engine(said: str, facts: EngineFacts) -> Engine:
    """Chooses the engine; raises ValueError if the requested one cannot be used.

    >>> choose_engine("auto", EngineFacts(size=2)).reason
    'there is no GPU, and no MPI launcher has started this process'
    """
    if said not in ENGINES:
        known = ", ".join(map(repr, ENGINES))
        raise ValueError(f"join: engine must be one of {known}; got {said!r}.")
    if said == "tensorflow":
        return Engine("tensorflow", "it was asked for")
    if facts.size == 1 and said == "auto":
        return Engine("tensorflow", "the process is alone")
    against = {"nccl": _against_nccl(facts), "mpi": _against_mpi(facts)}
    if said != "auto":
        if against[said]:
            raise ValueError(f"join: engine={said!r} cannot be used: {against[said]}.")
        return Engine(said, "it was asked for")
    if not against["nccl"]:
        return Engine("nccl", "this process has a GPU", falls_back=True)
    if not against["mpi"] and not facts.num_gpus:
        return Engine("mpi", f"{facts.mpi_launcher} has started this process")
    if facts.num_gpus:
        return Engine("tensorflow", against["nccl"])
    return Engine("tensorflow", f"there is no GPU, and {against['mpi']}")


def _against_nccl(facts: EngineFacts) -> str:
    """Returns why NCCL cannot be used; "" if it can."""
    if not facts.num_gpus:
        return "NCCL is for GPUs, and this process sees none"
    if not facts.tensorflow_has_nccl:
        return "this TensorFlow was built without CUDA, and so without NCCL"
    return ""


def _against_mpi(facts: EngineFacts) -> str:
    """Returns why MPI cannot be used; "" if it can."""
    if not facts.mpi_launcher:
        return "no MPI launcher has started this process"
    if not facts.has_mpi4py:
        return "mpi4py is not installed (pip install mpi4py)"
    return ""
