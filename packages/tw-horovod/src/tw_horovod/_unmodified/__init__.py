"""Programs of Horovod that run as they are: the names that they import."""

from pathlib import Path


def python_path() -> str:
    """Returns the folder that holds the modules ``horovod`` and ``mpi4py``."""
    return str(Path(__file__).parent / "_python_path")
