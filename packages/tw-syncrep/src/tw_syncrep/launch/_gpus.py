"""Divides the GPUs of this machine among the workers of a launch.

TensorFlow takes nearly all memory of every GPU that a process sees, so no two tasks
may see the same one. The CUDA driver shows a process the GPUs that its variable
CUDA_VISIBLE_DEVICES lists.
"""

import os
import subprocess
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

_LISTING_S = 30.0


def find_gpus(*, driver: Path = Path("/proc/driver/nvidia/gpus")) -> tuple[str, ...]:
    """Lists usable GPUs, as CUDA_VISIBLE_DEVICES does, without loading CUDA."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return tuple(map(str, range(_count_gpus(driver))))
    # As in CUDA, an entry that names no device ends the list.
    entries = (entry.strip() for entry in listed.split(","))
    gpus = tuple(takewhile(_names_device, entries))
    if twice := sorted({gpu for gpu in gpus if gpus.count(gpu) > 1}):
        raise ValueError(
            f"find_gpus: CUDA_VISIBLE_DEVICES must list each GPU once; got {listed!r}, "
            f"which repeats {', '.join(twice)}."
        )
    return gpus


def share_gpus(
    gpus: Sequence[str], *, workers: int, per_task: int | None
) -> tuple[str | None, ...]:
    """Returns each worker's CUDA_VISIBLE_DEVICES; "" hides all, None leaves it."""
    if per_task is None:
        if not gpus or not workers:
            return (None,) * workers
        per_task = len(gpus) // workers
    if per_task * workers > len(gpus):
        there_are = f"{len(gpus)} ({', '.join(gpus)})" if gpus else "none"
        raise ValueError(
            f"share_gpus: --gpus-per-task {per_task} of {workers} workers needs "
            f"{per_task * workers}; there are {there_are}. Ask for fewer GPUs or "
            "workers; 0 has them train without."
        )
    starts = [worker * per_task for worker in range(workers)]
    return tuple(",".join(gpus[start : start + per_task]) for start in starts)


def _names_device(entry: str) -> bool:
    return entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))


def _count_gpus(driver: Path) -> int:
    """Counts the GPUs that ``nvidia-smi`` lists, or else the driver's folders.

    In a container, some of these may be GPUs that this process may not use.
    """
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            capture_output=True,
            text=True,
            timeout=_LISTING_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return len(list(driver.iterdir())) if driver.is_dir() else 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
