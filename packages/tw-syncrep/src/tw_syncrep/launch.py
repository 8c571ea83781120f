"""``tw-launch``: starts the tasks of a cluster on this machine, with TF_CONFIG set.

tw-launch --ps 1 --workers 2 -- python train.py --epochs 3
"""

import argparse
import math
import sys
from collections.abc import Sequence

from tw_core.checks import check_list, check_text
from tw_syncrep._gpus import find_gpus
from tw_syncrep._supervisor import Supervisor, TaskPlan, TaskProcess, plan_tasks, say
from tw_syncrep.cluster._network_exposure import find_free_ports, isolate

__all__ = ["main"]

_CANNOT_START = 2
_COUNTS = (
    ("--ps", 1, "parameter servers"),
    ("--workers", 2, "replicas; the first is chief"),
    ("--evaluators", 0, "0 or 1, outside the cluster"),
    ("--max-restarts", 0, "of each task that fails"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``tw-launch``.

    Args:
      arguments: of the command line; by default this process's.

    Returns:
      The exit status: 0, the status of the first task that failed for good, 128
      plus a signal's number, or 2 where nothing could be started.

    Raises:
      TypeError: ``arguments`` are not strings.
    """
    if arguments is not None:
        for argument in check_list("main", arguments=arguments, empty=True):
            check_text("main", argument=argument, empty=True)
    options = _parse(arguments)
    try:
        if options.isolate:
            isolate()
        tasks = [TaskProcess(plan, options.command) for plan in _plan(options)]
        supervisor = Supervisor(
            tasks,
            max_restarts=options.max_restarts,
            grace_s=options.grace,
            min_workers=options.min_workers,
        )
        return supervisor.run()
    except (OSError, RuntimeError, ValueError) as error:
        say(sys.stderr, f"[tw-launch] {error}\n")
        return _CANNOT_START


def _plan(options: argparse.Namespace) -> tuple[TaskPlan, ...]:
    """Plans the tasks, and says where workers are left without the GPUs there are."""
    gpus = find_gpus()
    plans = plan_tasks(
        ps=options.ps,
        workers=options.workers,
        evaluators=options.evaluators,
        ports=find_free_ports(options.ps + options.workers),
        gpus=gpus,
        gpus_per_task=options.gpus_per_task,
    )
    if options.gpus_per_task is None and 0 < len(gpus) < options.workers:
        say(
            sys.stderr,
            f"[tw-launch] {len(gpus)} GPU{'s' * (len(gpus) > 1)} for "
            f"{options.workers} workers: none gets one\n",
        )
    return plans


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tw-launch",
        description="Starts the tasks of a TensorFlow cluster on this machine.",
        epilog="Example: tw-launch --ps 1 --workers 2 -- python train.py",
    )
    for name, default, meaning in _COUNTS:
        parser.add_argument(
            name, type=_count, default=default, help=f"{meaning} ({default})"
        )
    parser.add_argument(
        "--min-workers",
        type=_positive,
        help="with so many left, go on without workers that fail for good (all)",
    )
    parser.add_argument(
        "--gpus-per-task",
        type=_count,
        help="of each worker (as many as there are for each); other tasks get none",
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=10.0,
        help="seconds between asking all tasks to end and killing them (10)",
    )
    parser.add_argument(
        "--isolate",
        action="store_true",
        help="run in a network namespace, out of other machines' reach",
    )
    parser.add_argument(
        "command", nargs="+", help="what every task runs, after --", metavar="COMMAND"
    )
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be 0 or more; got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be 1 or more; got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be seconds, 0 or more; got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
