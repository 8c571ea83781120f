"""How processes of ``test_foreign_tests`` end; children must be able to import it."""

import os
import signal
import time
from pathlib import Path


def end(path: Path, how: str) -> None:
    """Ends by a signal, or with an outcome."""
    if how == "crashed":
        os.kill(os.getpid(), signal.SIGKILL)
    path.write_text(f"{how}\nits output")


def hang(path: Path, started: Path) -> None:
    """Starts another process, and does not end."""
    child = os.fork()
    if child:
        started.write_text(f"{os.getpid()} {child}")
    time.sleep(600)
