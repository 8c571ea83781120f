"""The side channel: a connection of every rank to rank 0, for all but tensors.

    rank 0                                       every rank, rank 0 too
    ------                                       ----------------------
    listens                       <- hello ---   connects, says who it is
    waits until all have come     -- welcome ->  knows all addresses
    compares, gives a number      <- agree ---   describes a collective, waits
    (Exchange)                    -- agreed -->  goes on, or raises
    hands a description on        -- followed -> does as others, whose step it lacks
    notes who is where            <- beat ----   a few times a second
    (Attendance)                  -- beat ---->  knows that rank 0 answers
    is in doubt about some        -- report -->  says at once how far it is
    finds who is missing          -- missing ->  ends what it waits in, raises

TensorFlow's collectives end with errors that name no rank, or do not end. What they
wait for is known here, whatever state they are in, as nothing here goes through
TensorFlow. Messages are JSON objects, one per line (``cluster/_channel.py``).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tw_syncrep.cluster._channel import LineSocket as LineSocket

_RUNS = (
    # Variables that name a run together, of which the first must be set; and one that
    # counts its starts. TORCHELASTIC_RESTART_COUNT differs between machines.
    (("TW_RUN_ID",), "TW_START"),
    (("TORCHELASTIC_RUN_ID",), ""),
    (("PMIX_RUNSPACE",), ""),
    (("OMPI_MCA_ess_base_jobid",), ""),
    (("SLURM_JOB_ID", "SLURM_STEP_ID"), "SLURM_RESTART_COUNT"),
    (("PBS_JOBID",), ""),
    (("LSB_JOBID", "LSB_JOBINDEX"), ""),
    (("TRAINING_JOB_NAME",), ""),
    (("CLOUD_ML_JOB_ID",), ""),
)


def find_interval_s(timeout_s: float) -> float:
    """Returns how often ranks are heard, in seconds."""
    return min(0.25, max(0.02, timeout_s / 8))


@dataclass(frozen=True)
class Introduction:
    """What a rank says of itself when it comes.

    Attributes:
      rank: its number.
      size: how many ranks it expects.
      address: "host:port" of its TensorFlow server.
      task: "host:port, process 123", for messages.
      machine: what ranks of one machine have in common.
      versions: of what must be the same everywhere.
      run: which run it belongs to; empty where nothing says so.
      start: how often the run was started before.
    """

    rank: int
    size: int
    address: str
    task: str
    machine: str
    versions: Mapping[str, str]
    run: str = ""
    start: int = 0


def find_run(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Returns the run's name, "" where nothing tells it, and how often it was started.

    Two jobs at one address do not mix where it is known.

    >>> find_run({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"})
    ('SLURM_JOB_ID=12 SLURM_STEP_ID=0', 0)
    >>> find_run({"TW_RUN_ID": "5f0c", "TW_START": "1", "SLURM_JOB_ID": "12"})
    ('TW_RUN_ID=5f0c', 1)
    """
    for names, starts in _RUNS:
        # "none" is torchrun's for all runs without a rendezvous.
        if environment.get(names[0], "none") not in ("", "none"):
            told = [f"{n}={environment[n]}" for n in names if environment.get(n)]
            count = environment.get(starts, "0")
            return " ".join(told), int(count) if count.isdecimal() else 0
    return "", 0
