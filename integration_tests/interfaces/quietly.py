"""Runs Python's tools, and shows what they say only where they fail."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from interfaces.repository import environment_outside_hooks


def run_quietly(
    module: str,
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Runs ``python -m module`` with this interpreter.

    Args:
      module: a tool, such as ``build``.
      *arguments: of the tool.
      cwd: where it runs; by default here.
      env: variables to set for it.

    Raises:
      RuntimeError: it fails; the message holds all that it said.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd,
        # Some of them call git.
        env={**environment_outside_hooks(), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        command = " ".join([module, *arguments])
        raise RuntimeError(f"{command} failed with {done.returncode}:\n{done.stdout}")
