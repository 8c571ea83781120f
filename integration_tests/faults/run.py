"""Fault trials: kills or stops tasks of real clusters, and times the errors.

Every survivor must raise the right error within ``wait_timeout_s`` plus one second
of the fault, in every trial. Run by the nox session ``faults``:

    nox -s faults -- --trials 20
"""

import argparse
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2] / "packages" / "tw-syncrep" / "tests"
sys.path.insert(0, str(TESTS))
GRACE_S = 1.0


def main() -> int:
    """Runs the trials and tells how many were good."""
    from syncrep_faults import FAULTS
    from syncrep_tasks import make_template

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=20, help="of each fault")
    parser.add_argument("--fault", choices=list(FAULTS), help="only this one")
    arguments = parser.parse_args()
    template = make_template()
    bad = 0
    for fault in [arguments.fault] if arguments.fault else FAULTS:
        verdicts = [trial(template, fault) for _ in range(arguments.trials)]
        good = [seconds for is_good, seconds in verdicts if is_good]
        bad += len(verdicts) - len(good)
        slowest = max((seconds for _, seconds in verdicts), default=0.0)
        print(
            f"{fault}: {len(good)} of {len(verdicts)} in time, slowest {slowest:.2f} s",
            flush=True,
        )
    return 1 if bad else 0


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
