"""Ray 2.40 and later: tasks of docs/examples/cluster/ray_program.py as actors.

A parameter server and two workers train the digits on a Ray cluster of this machine.
All workers must end in order, and most of the test rows be right.
"""

import argparse
import os
import re
import sys
from pathlib import Path

from harness.processes import succeed

DEADLINE_S = 600
LEAST = 75.0  # per cent of the test rows, at step 50
PROGRAM = Path(__file__).parents[3] / "docs/examples/cluster/ray_program.py"


def main() -> None:
    """Trains, and shows what the tasks have printed."""
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    command = [sys.executable, str(PROGRAM), "--", "--steps", "101"]
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    said = succeed(command, env=env, deadline_s=DEADLINE_S)
    print(said)
    assert "workers ended with [0, 0]" in said
    assert float(re.findall(r"step 50: (\S+) % of the test rows", said)[0]) > LEAST


if __name__ == "__main__":
    main()
