"""A rank's introduction to rank 0 when it joins, and the interval of its reports."""

import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RANK_0 = "rank 0"
"""Rank 0's port, in proofs of having its key."""

_RUNS = (
    # Variables that together name a run, of which the first must be set; and one that
    # counts its starts. TORCHELASTIC_RESTART_COUNT differs between machines.
    (("TW_RUN_ID",), "TW_START"),
    (("TORCHELASTIC_RUN_ID",), ""),
    (("PMIX_NAMESPACE",), ""),
    (("OMPI_MCA_ess_base_jobid",), ""),
    (("SLURM_JOB_ID", "SLURM_STEP_ID"), "SLURM_RESTART_COUNT"),
    (("PBS_JOBID",), ""),
    (("LSB_JOBID", "LSB_JOBINDEX"), ""),
    (("TRAINING_JOB_NAME",), ""),
    (("CLOUD_ML_JOB_ID",), ""),
)


_MOST_REPORTS_PER_S = 500
"""That rank 0 receives; the interval grows from 125 ranks on."""


def find_interval_s(timeout_s: float, size: int) -> float:
    """Returns the interval between reports of a rank, in seconds."""
    usual_s = max(0.25, size / _MOST_REPORTS_PER_S)
    return min(usual_s, max(0.02, timeout_s / 8))


@dataclass(frozen=True)
class Introduction:
    """A rank's description of itself when it joins."""

    rank: int
    size: int
    address: str  # "host:port" of its TensorFlow server; "" over MPI.
    task: str  # "host, process 123", for messages.
    machine: str  # Equal for all ranks of one machine.
    versions: Mapping[str, str]  # Of software that must be the same on all ranks.
    run: str = ""  # "" if unknown.
    start: int = 0  # How often the run was started before.

    @property
    def host(self) -> str:
        """The host's name."""
        return self.task.partition(",")[0]


def find_local_ranks(introductions: Sequence[Introduction], rank: int) -> list[int]:
    """Returns the ranks on the machine of one of them."""
    own = introductions[rank].machine
    return [r for r, other in enumerate(introductions) if other.machine == own]


def find_run(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Returns the run's name, "" if unknown, and how often it was started before.

    Two jobs at one address do not mix if their names are known.

    >>> find_run({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"})
    ('SLURM_JOB_ID=12 SLURM_STEP_ID=0', 0)
    >>> find_run({"TW_RUN_ID": "5f0c", "TW_START": "1", "SLURM_JOB_ID": "12"})
    ('TW_RUN_ID=5f0c', 1)
    """
    for names, starts in _RUNS:
        # torchrun names every run without a rendezvous "none".
        if environment.get(names[0], "none") not in ("", "none"):
            told = [f"{n}={environment[n]}" for n in names if environment.get(n)]
            if "MPI_LOCALNRANKS" in environment:  # MPICH: on other nodes only.
                told = [one for one in told if not one.startswith("SLURM_STEP_ID")]
            count = environment.get(starts, "0")
            return " ".join(told), int(count) if count.isdecimal() else 0
    return "", 0


def describe_failure(error: Exception) -> str:
    """Explains that a rank's thread has ended with an error, and where it arose."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    said = "".join(traceback.format_exception_only(error)).strip()
    file = os.path.basename(last.filename)
    where = f"{file}, line {last.lineno}, in {last.name}"
    return f"has lost its side-channel thread ({said:.200}; {where})"
