"""Programs that tests start in a cluster, and that end whatever happens."""

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path


def run_to_its_end(
    command: Sequence[str], *, deadline_s: float, cwd: Path | None = None
) -> tuple[int, str]:
    """Runs a command, which is killed with all that it started at the deadline.

    Returns:
      Its status, negative if killed, and what was said.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output
