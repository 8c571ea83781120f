"""Fault trials: kills or stops tasks of real clusters, and times the errors.

Every survivor must raise the right error within ``wait_timeout_s`` plus one second
of the fault, in every trial; and what starts afterwards must go on, or afresh. Run by
the nox session ``faults``:

    nox -s faults -- --trials 20
"""

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2] / "packages" / "tw-syncrep" / "tests"
sys.path.insert(0, str(TESTS))
GRACE_S = 1.0
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def main() -> int:
    """Runs the trials and tells how many were good."""
    from syncrep_faults import FAULTS, RECOVERIES
    from syncrep_tasks import make_template

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=20, help="of each fault")
    parser.add_argument("--fault", choices=[*FAULTS, *RECOVERIES], help="only this one")
    arguments = parser.parse_args()
    template = make_template()
    bad = 0
    for fault in [arguments.fault] if arguments.fault else [*FAULTS, *RECOVERIES]:
        if fault in FAULTS:
            verdicts = [trial(template, fault) for _ in range(arguments.trials)]
            bad += sum(not is_good for is_good, _ in verdicts)
            print(f"{fault}: {summary(verdicts)}", flush=True)
        else:
            good = [recovers(template, fault) for _ in range(arguments.trials)]
            bad += good.count(False)
            print(f"{fault}: {sum(good)} of {len(good)} went on", flush=True)
    return 1 if bad else 0


def recovers(template: Any, fault: str) -> bool:
    """Runs one trial of what goes on after a fault."""
    from syncrep_faults import RECOVERIES
    from syncrep_tasks import Tasks

    tasks = Tasks(template)
    try:
        tasks.serve()
        RECOVERIES[fault](tasks)
    except (AssertionError, TimeoutError) as error:
        print(f"{fault}: FAILED: {error}", flush=True)
        return False
    finally:
        tasks.kill()
    return True


def summary(verdicts: list[tuple[bool, float]]) -> str:
    """Tells how many were good, and how far beyond the deadline the errors came."""
    from syncrep_faults import WAIT_S

    good = sum(is_good for is_good, _ in verdicts)
    beyond = [seconds - WAIT_S for _, seconds in verdicts] or [0.0]
    middle, most = statistics.median(beyond), max(beyond)
    return (
        f"{good} of {len(verdicts)} within the deadline plus {GRACE_S:g} s; beyond the "
        f"deadline {middle:.2f} s in the middle, {most:.2f} s at most"
    )


def trial(template: Any, fault: str) -> tuple[bool, float]:
    """Runs one trial; whether it was good, and the slowest survivor's seconds."""
    from syncrep_faults import FAULTS, WAIT_S, run_trial
    from syncrep_tasks import Tasks

    tasks = Tasks(template)
    try:
        tasks.serve()
        reports = run_trial(tasks, fault)
    except (AssertionError, TimeoutError) as error:
        print(f"{fault}: FAILED: {error}", flush=True)
        return False, float("inf")
    finally:
        tasks.kill()
    slowest = max(report.after_s for report in reports)
    wrong = [report for report in reports if report.error != FAULTS[fault]]
    for report in reports:
        if report in wrong or report.after_s > WAIT_S + GRACE_S:
            print(f"{fault}: {report}", flush=True)
    return not wrong and slowest <= WAIT_S + GRACE_S, slowest


if __name__ == "__main__":
    sys.exit(main())
