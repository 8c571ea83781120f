"""Launchers: the one that started this process, and the rank and size it gave.

A detector reads the environment that its launcher gives a process, and returns a
``Place`` or None. Several may return one, as with ``torchrun`` in a Slurm step: the
innermost, which has started this very process, is first in ``find_places``.
"""

import itertools
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

Environment = Mapping[str, str]
FIRST_PORT, NUM_PORTS = 20_000, 9_000
"""Below the ports that Linux (from 32768) and Kubernetes (from 30000) give out."""

_FIRST_SHELL = 0xFFFF_FFF0
"""Slurm numbers steps without ``srun`` from here on: batch scripts, shells."""


@dataclass(frozen=True)
class Place:
    """The rank and more that a launcher gives a process that it starts."""

    launcher: str
    variable: str  # The variable with the rank.
    rank: int = 0
    size: int = 1
    coordinator: tuple[str, int] | None = None  # None: the launcher does not give it.
    spans_machines: bool = False
    is_mpi: bool = False
    fault: str = ""  # An error in the launcher's variables.


def find_places(environment: Environment) -> list[Place]:
    """Returns the places that all launchers give this process, the innermost first.

    >>> torch = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "9"}
    >>> [place] = find_places(torch)
    >>> place.rank, place.size, place.coordinator
    (1, 2, ('a', 9))
    """
    return [place for find in _DETECTORS if (place := find(environment)) is not None]


def derive_port(job: str) -> int:
    """Returns a port for a job's id, the same in all its processes.

    >>> FIRST_PORT <= derive_port("SLURM 12.0") < FIRST_PORT + NUM_PORTS
    True
    """
    return FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS


def expand_nodes(nodes: str) -> Iterator[str]:
    """Yields the hosts of a Slurm node list, in order.

    >>> list(expand_nodes("login,node[01-03,7]"))
    ['login', 'node01', 'node02', 'node03', 'node7']
    """
    for item in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", nodes):
        # Plain text at even places, text from brackets at odd ones.
        parts = re.split(r"\[([^\]]*)\]", item)
        choices = [_expand_ranges(p) if n % 2 else [p] for n, p in enumerate(parts)]
        yield from map("".join, itertools.product(*choices))


def _expand_ranges(ranges: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        found += [str(number).zfill(len(first)) for number in numbers]
    return found


def _find_torchrun(environment: Environment) -> Place | None:
    """Detects ``torchrun``, whose agent listens at MASTER_PORT on rank 0's machine."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    return _find_torch("torchrun", environment)


def _find_variables(environment: Environment) -> Place | None:
    """Detects the variables of PyTorch's ``env://``, some of which others use, too."""
    if not (environment.get("RANK") and environment.get("WORLD_SIZE")):
        return None
    if "TORCHELASTIC_RUN_ID" in environment:
        return None
    return _find_torch("the environment", environment)


def _find_torch(launcher: str, environment: Environment) -> Place:
    place = _read(launcher, environment, "RANK", "WORLD_SIZE")
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT", "")
    if place.size == 1:  # Also where it is at fault.
        return place
    if not host:
        return replace(place, fault="MASTER_ADDR is not set")
    number = int(port) if port.isdecimal() else 0
    if (
        not 0 < number < 65536
        or environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    ):
        run = environment.get("TORCHELASTIC_RUN_ID", "")
        number = derive_port(f"torchrun {run} {host} {port}")
    local = environment.get("LOCAL_WORLD_SIZE") or environment["WORLD_SIZE"]
    return replace(
        place, coordinator=(host, number), spans_machines=local != str(place.size)
    )


def _find_horovod(environment: Environment) -> Place | None:
    """Detects ``horovodrun`` over Gloo: its server is the launcher's, not rank 0's."""
    names = "HOROVOD_RANK", "HOROVOD_SIZE"
    if not _has_any(environment, *names):
        return None
    place = _read("horovodrun", environment, *names)
    if environment.get("HOROVOD_LOCAL_SIZE") != str(place.size):
        return replace(place, spans_machines=True)
    job = environment.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    return replace(place, coordinator=("localhost", derive_port(f"horovodrun {job}")))


def _find_mpi(environment: Environment) -> Place | None:
    """Detects Open MPI, or Hydra, the launcher of MPICH and Intel MPI."""
    job = environment.get("PMIX_NAMESPACE") or environment.get(
        "OMPI_MCA_ess_base_jobid", ""
    )
    if _has_any(environment, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        launcher, world = "mpirun (Open MPI)", "OMPI_COMM_WORLD_"
        place = _read(launcher, environment, f"{world}RANK", f"{world}SIZE")
        local = environment.get(f"{world}LOCAL_SIZE")
    elif environment.get("MPI_LOCALNRANKS"):
        place = _read("mpiexec (MPICH)", environment, "PMI_RANK", "PMI_SIZE")
        local = environment["MPI_LOCALNRANKS"]
        job = job or f"Hydra {_find_ancestor('hydra_pmi_proxy')}"
    elif _find_step(environment) or not _has_any(environment, "PMI_RANK", "PMIX_RANK"):
        return None
    else:
        variable = "PMI_RANK" if environment.get("PMI_RANK") else "PMIX_RANK"
        place = _read("an MPI launcher", environment, variable, "PMI_SIZE")
        local = None
    # Programs that look for a launcher also get these variables without MPI.
    place = replace(place, is_mpi=bool(job or local is None))
    if local == str(place.size):
        return replace(place, coordinator=("localhost", derive_port(job)))
    return replace(
        place, coordinator=_find_first_node(environment), spans_machines=True
    )


def _find_first_node(environment: Environment) -> tuple[str, int] | None:
    """Rank 0's machine in a Slurm job, where ``mpirun`` has placed the ranks."""
    nodes = environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        return None
    return next(expand_nodes(nodes)), derive_port(
        f"Slurm {environment['SLURM_JOB_ID']}"
    )


def _find_slurm(environment: Environment) -> Place | None:
    """Detects ``srun``; a batch script or a shell of ``salloc`` is one process."""
    step = _find_step(environment)
    if not step:
        return None
    size = "SLURM_STEP_NUM_TASKS"
    size = size if environment.get(size) else "SLURM_NTASKS"
    kind = ""  # Slurm's own PMI, not that of an mpiexec in the step.
    if environment.get("PMIX_NAMESPACE", "").startswith("slurm."):
        kind = "pmix"
    elif environment.get("PMI_RANK") and not environment.get("MPI_LOCALNRANKS"):
        kind = "pmi"
    launcher = f"srun --mpi={kind}" if kind else "srun"
    place = _read(launcher, environment, "SLURM_PROCID", size)
    nodes = list(expand_nodes(environment.get("SLURM_STEP_NODELIST", "")))
    if not nodes:
        return replace(place, fault=place.fault or "SLURM_STEP_NODELIST is not set")
    host = nodes[0] if len(nodes) > 1 else "localhost"
    return replace(
        place,
        coordinator=(host, derive_port(f"Slurm {step}")),
        spans_machines=len(nodes) > 1,
        is_mpi=bool(kind),
    )


def _find_step(environment: Environment) -> str:
    """Returns "job.step" in a step that ``srun`` has started, or ""."""
    step = environment.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= _FIRST_SHELL:
        return ""
    return f"{environment.get('SLURM_JOB_ID', '')}.{step}"


def _find_trainer(environment: Environment) -> Place | None:
    """Detects Kubeflow's Trainer, whose pods each run one process, or ``torchrun``.

    PET_NPROC_PER_NODE is only for ``torchrun``, and by default the number of cores.
    """
    if not environment.get("PET_NNODES") or not environment.get("PET_MASTER_ADDR"):
        return None
    place = _read("Kubeflow Trainer", environment, "PET_NODE_RANK", "PET_NNODES")
    port = environment.get("PET_MASTER_PORT") or "29500"
    at = environment["PET_MASTER_ADDR"], int(port) if port.isdecimal() else 0
    return replace(place, coordinator=at, spans_machines=place.size > 1)


def _find_indexed_job(environment: Environment) -> Place | None:
    """Detects an Indexed Job of Kubernetes that sets TW_SIZE and TW_SERVICE."""
    index = environment.get("JOB_COMPLETION_INDEX")
    if not index:
        return None
    variable = "JOB_COMPLETION_INDEX"
    place = _read("Kubernetes Job", environment, variable, "TW_SIZE")
    if place.size == 1:
        return place
    service, host = environment.get("TW_SERVICE"), environment.get("HOSTNAME", "")
    if not service or not host.endswith(f"-{index}"):
        needed = f"a pod job-{index} of a headless service"
        said = f"HOSTNAME={host!r} and TW_SERVICE={service!r} do not name {needed}"
        return replace(place, fault=place.fault or said)
    first = f"{host.removesuffix(index)}0.{service}"
    at = first, derive_port(f"Job {first}")
    return replace(place, coordinator=at, spans_machines=True)


_DETECTORS = (
    _find_torchrun,
    _find_horovod,
    _find_mpi,
    _find_slurm,
    _find_variables,
    _find_trainer,
    _find_indexed_job,
)
"""The innermost first: ``srun torchrun`` is usual, and ``torchrun srun`` is not."""


def _read(launcher: str, environment: Environment, rank: str, size: str) -> Place:
    """Reads a rank and a size, and notes where they are not whole numbers."""
    texts = [environment.get(name, "") for name in (rank, size)]
    said = " and ".join(
        f"{name}={text}" if text else f"no {name}"
        for name, text in zip((rank, size), texts, strict=True)
    )
    if not all(text.isdecimal() for text in texts) or int(texts[0]) >= int(texts[1]):
        return Place(launcher, rank, fault=f"the environment has {said}")
    return Place(launcher, rank, int(texts[0]), int(texts[1]))


def _has_any(environment: Environment, *names: str) -> bool:
    return any(environment.get(name) for name in names)


def _find_ancestor(name: str) -> int:
    """Returns the id of the nearest ancestor process of this name, or 0.

    Hydra gives its job's id only to MPI; its processes on a machine share one parent.
    """
    number = "self"
    while number not in ("", "0"):
        try:
            status = Path(f"/proc/{number}/status").read_text()
        except OSError:
            return 0
        found = dict(
            line.split(":\t", 1) for line in status.splitlines() if "\t" in line
        )
        if found.get("Name") == name[:15]:  # The kernel cuts longer names.
            return int(number)
        number = found.get("PPid", "")
    return 0
