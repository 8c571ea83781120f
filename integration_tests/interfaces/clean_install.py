"""Installs a wheel where nothing else is, and uses every name that it exports."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from interfaces.quietly import run_quietly

_USE = """
import {module} as module
for name in module.__all__:
    getattr(module, name)
"""


def check_clean_install(module: str, wheels: Sequence[Path]) -> None:
    """Installs wheels with what they need, and loads all that ``module`` exports.

    Args:
      module: the top-level module of the first wheel.
      wheels: the package's and those of its siblings, so that none comes from an index.

    Raises:
      RuntimeError: they do not install together, or a name does not load.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "env"
        run_quietly(
            *("uv", "venv", "--quiet", "--python", sys.executable, str(environment))
        )
        python = environment / "bin" / "python"
        run_quietly(
            *("uv", "pip", "install", "--quiet", "--python", str(python)),
            *map(str, wheels),
        )
        _use_every_name(python, module)


def _use_every_name(python: Path, module: str) -> None:
    done = subprocess.run(
        [str(python), "-I", "-c", _USE.format(module=module)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"{module} does not load from its wheel in a clean environment:\n"
            f"{done.stderr}"
        )
