"""The cluster of a run, and the tasks of each of its machines."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from itertools import accumulate

from tw_launch._addresses import join_address
from tw_launch._key import KEY_VARIABLE, derive_key
from tw_launch._launcher.messages import Hello, Start
from tw_launch._launcher.pmi import PmiTable


@dataclass(frozen=True)
class Share:
    """The tasks of one machine; only the first has servers and evaluators."""

    ps: int
    workers: int
    evaluators: int
    gpus: Sequence[str | None]  # a worker's CUDA_VISIBLE_DEVICES; None: left as it is
    node: int = 0
    num_nodes: int = 1
    horovod: str = ""  # folder with a module of that name; "" for other programs
    uses_mpi: bool = False  # whether workers are one MPI world
    key: str = field(default="", repr=False)  # shared by all machines; "" for none


@dataclass(frozen=True)
class TaskPlan:
    """One task."""

    job: str
    index: int  # within the job, over all machines
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment

    @property
    def name(self) -> str:
        """Display name, e.g. "worker 1"."""
        return f"{self.job} {self.index}"


def lay_out(
    nodes: Sequence[Hello], *, ps: int
) -> tuple[dict[str, tuple[str, ...]], tuple[int, ...]]:
    """Returns each job's addresses, and the index of each machine's first worker."""
    counts = [node.workers for node in nodes]
    listed = [[join_address(node.host, port) for port in node.ports] for node in nodes]
    servers, listed[0] = listed[0][:ps], listed[0][ps:]
    workers = [address for addresses in listed for address in addresses]
    jobs = {"ps": tuple(servers), "worker": tuple(workers)}
    firsts = tuple(accumulate(counts[:-1], initial=0))
    return {job: addresses for job, addresses in jobs.items() if addresses}, firsts


def plan_tasks(
    share: Share, start: Start, mpi: PmiTable | None = None
) -> tuple[TaskPlan, ...]:
    """Plans the tasks of one machine; only workers get GPUs, and a place in MPI."""
    counts = {"ps": share.ps, "worker": share.workers, "evaluator": share.evaluators}
    tasks = []
    for job, count in counts.items():
        for place in range(count):
            is_worker = job == "worker"
            index = place + start.first_worker * is_worker
            config = {"cluster": start.cluster, "task": {"type": job, "index": index}}
            variables = {
                "TF_CONFIG": json.dumps(config),
                "TW_NODE_RANK": str(share.node),
                "TW_NUM_NODES": str(share.num_nodes),
                "TW_RUN_ID": start.run,
                "TW_START": str(start.number),
            }
            if share.key:  # Each run has its own.
                variables[KEY_VARIABLE] = derive_key(share.key, start.run)
            if is_worker:
                variables["TW_LOCAL_RANK"] = str(place)
                variables["TW_LOCAL_SIZE"] = str(count)
                if share.horovod:
                    workers = len(start.cluster["worker"])
                    # Open MPI's variables would hide those of another MPI.
                    prefixes = [
                        "HOROVOD",
                        *(["OMPI_COMM_WORLD"] if mpi is None else []),
                    ]
                    path = filter(None, (share.horovod, os.environ.get("PYTHONPATH")))
                    variables["PYTHONPATH"] = os.pathsep.join(path)
                    variables |= _horovods(prefixes, index, workers, place, count)
                if mpi is not None:
                    variables |= mpi.variables(place)
            gpus = share.gpus[place] if is_worker else ""
            if gpus is not None:
                variables["CUDA_VISIBLE_DEVICES"] = gpus
            tasks.append(TaskPlan(job, index, variables))
    return tuple(tasks)


def find_horovod() -> str:
    """Returns the folder in which tw-horovod has a module named ``horovod``.

    An entry point says where: this package does not import one that builds on it.
    """
    found = entry_points(group="tw_launch.python_paths", name="horovod")
    if not found:
        raise ValueError(
            "--horovod needs the package tw-horovod, which is not installed; install "
            "it from its files, as its README says."
        )
    [one] = found
    return str(one.load()())


def _horovods(
    prefixes: Sequence[str], rank: int, size: int, local_rank: int, local_size: int
) -> dict[str, str]:
    """Returns the variables that Horovod programs read: Gloo's and Open MPI's."""
    numbers = {"RANK": rank, "SIZE": size}
    numbers |= {"LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {
        f"{prefix}_{name}": str(number)
        for prefix in prefixes
        for name, number in numbers.items()
    }
