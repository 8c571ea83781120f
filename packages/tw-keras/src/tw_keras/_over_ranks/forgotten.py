"""Warns where a launcher has started several processes and none has joined a group.

Each would train a model of its own, and end with status 0.
"""

import functools
import json
import os
import sys
import warnings
from collections.abc import Mapping

_VARIABLES = (
    ("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("an MPI launcher", "PMI_RANK", ("PMI_SIZE",)),
    ("srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
)
_FIRST_SHELL = 0xFFFF_FFF0  # Slurm numbers steps without ``srun`` from here on.


@functools.cache  # once per process
def warn_if_forgotten() -> None:
    """Warns if this process is one of several, and has not joined the others."""
    found = find_launcher(os.environ)
    # This package does not import tw_ranks, which loads its parts when they are used:
    # a process that has joined, for its own steps or as Horovod, has some.
    joining = ("tw_ranks.", "tw_horovod.", "horovod.")
    if found is None or any(name.startswith(joining) for name in sys.modules):
        return
    launcher, count = found
    warnings.warn(
        f"TowerModel: {launcher} has started {count} processes, but this one has "
        "joined no group, so each trains a model of its own. To train one model, "
        "begin with group = tw_ranks.join() and pass TowerModel(..., group=group).",
        stacklevel=3,
    )


def find_launcher(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Returns what has started several processes that can join, and their number.

    >>> find_launcher({"PMI_RANK": "0", "PMI_SIZE": "2"})
    ('an MPI launcher', 2)
    >>> find_launcher({"PMI_RANK": "0", "PMI_SIZE": "1"}) is None
    True
    """
    cluster, job = _read_tf_config(environment.get("TF_CONFIG", ""))
    if cluster:
        counts = [len(own) for name, own in cluster.items() if name in _WORKERS]
        # Parameter servers synchronise otherwise; an evaluator is alone.
        trains = job in _WORKERS and "ps" not in cluster and sum(counts) > 1
        return ("a launcher (see TF_CONFIG)", sum(counts)) if trains else None
    for launcher, rank, sizes in _VARIABLES:
        size = next((environment[n] for n in sizes if environment.get(n)), "")
        if launcher == "srun" and not _is_step(environment.get("SLURM_STEP_ID", "")):
            continue  # a batch script or a shell, which is one process
        if environment.get(rank, "").isdecimal() and size.isdecimal():
            return (launcher, int(size)) if int(size) > 1 else None
    return None


_WORKERS = ("chief", "master", "worker")


def _read_tf_config(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the cluster, and the job of this process; both empty if not known."""
    try:
        config = json.loads(text)
        cluster, job = config["cluster"], str(config["task"]["type"])
    except (ValueError, TypeError, KeyError):
        return {}, ""
    return (cluster, job) if isinstance(cluster, dict) else ({}, "")


def _is_step(step: str) -> bool:
    return step.isdecimal() and int(step) < _FIRST_SHELL
