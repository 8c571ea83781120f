"""Which run this process belongs to, so that two jobs at one address do not mix."""

import os
from collections.abc import Mapping

_NAMES = (
    # Variables that name a run together, of which the first must be set; and one that
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


def find_run(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Returns the run's name, "" where nothing tells it, and how often it was started.

    >>> find_run({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"})
    ('SLURM_JOB_ID=12 SLURM_STEP_ID=0', 0)
    >>> find_run({"TW_RUN_ID": "5f0c", "TW_START": "1", "SLURM_JOB_ID": "12"})
    ('TW_RUN_ID=5f0c', 1)
    """
    for names, starts in _NAMES:
        # "none" is torchrun's for all runs without a rendezvous.
        if environment.get(names[0], "none") not in ("", "none"):
            told = [f"{n}={environment[n]}" for n in names if environment.get(n)]
            count = environment.get(starts, "0")
            return " ".join(told), int(count) if count.isdecimal() else 0
    return "", 0
