"""Trains for a long time while tasks are killed, and checks that nothing is lost.

Asynchronous towers run in one process; tw-launch also runs a cluster in which a worker,
the parameter server and the chief are killed in turn, restarted and rejoin. One worker
is never killed: it is long-lived, like the towers and the launcher, whose memory and
descriptors must not grow. Nothing may be lost: every step is applied once, and no
restart falls behind the last checkpoint.

    nox -s faults -- soak --minutes 2

With ``--processes`` tw-launch runs a process group instead, without servers and without
the towers. A kill of any rank restarts all ranks from the last checkpoint: the launcher
is long-lived, and each rank's new process must not use more memory than the one before.

    nox -s faults -- soak --processes --minutes 30 --kill-every 60
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from lab.soak.course import GroupSoak, Soak


def main() -> int:
    """Runs the soak; 0 when nothing was lost, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--processes", action="store_true", help="run a process group, without servers"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="30 by default")
    parser.add_argument(
        "--kill-every",
        type=float,
        help="seconds between kills; 60, or 20 in a short run",
    )
    parser.add_argument("--log", type=Path, help="file for the programs' output")
    parser.add_argument(
        "--light",
        action="store_true",
        help="spare the processor: fork the tasks, and pause after each step",
    )
    options = parser.parse_args()
    kill_every_s = options.kill_every or (60.0 if options.minutes > 5 else 20.0)
    # Also where a shell's background job has Python ignore SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        make = GroupSoak if options.processes else Soak
        soak = make(Path(folder), kill_every_s, options.log, is_light=options.light)
        return run(soak, 60 * options.minutes)


def run(soak: Soak, seconds: float) -> int:
    """Takes a soak from its start to its summary."""
    interrupted = False
    try:
        soak.start()
        soak.run(seconds)
        soak.stop()
    except KeyboardInterrupt:
        interrupted = True
    except RuntimeError as error:
        soak.faults.append(str(error))
    finally:
        soak.end()
    for line in soak.summary():
        print(line)
    for fault in soak.faults:
        print(f"FAULT: {fault}")
    if soak.faults:
        print(soak.explain())
    print("interrupted" if interrupted else f"{len(soak.faults)} faults", flush=True)
    return 130 if interrupted else min(1, len(soak.faults))


if __name__ == "__main__":
    sys.exit(main())
