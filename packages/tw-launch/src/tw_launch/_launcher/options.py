"""The command line of ``tw-launch``."""

import argparse
import importlib.util
import math
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from tw_launch._addresses import split_address
from tw_launch._launcher.rules import Rules

_EXAMPLES = """\
examples:
  tw-launch -n 2 -- python train.py
  tw-launch -n 2 --restart group --max-restarts 3 -m package.train
  tw-launch --mpi -n 2 -- python train.py
  tw-launch --ps 1 --workers 2 -- python train.py
  tw-launch --nnodes 2 --node-rank 0 --coordinator 10.0.0.1:29400 -- python train.py
  tw-launch --horovod -np 2 -- python train.py
"""
_COUNTS = (
    ("--evaluators", 0, "number of evaluators, 0 or 1, outside the cluster, on node 0"),
    ("--max-restarts", 0, "most restarts of a task, or of all with --restart group"),
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line, by default this process's; exits if it is wrong."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # The rest belongs to the tasks, however argparse would read it.
    at = words.index("--") if "--" in words else len(words)
    parser = _parser()
    options = parser.parse_args(words[:at])
    if fault := _fault_of_counts(options):
        parser.error(fault)
    if options.ps is None:
        are_ranks = options.horovod or options.mpi or options.np is not None
        options.ps = 0 if are_ranks else 1
    if options.workers is None:
        options.workers = options.np or 2
    command, theirs = options.command, words[at + 1 :]
    if options.module is not None:
        options.command = [sys.executable, "-m", *options.module, *command, *theirs]
    elif theirs[:1] == ["-m"]:
        options.command = [sys.executable, *theirs]
    else:
        options.command = [*command, *theirs]
    if fault := _fault(options):
        parser.error(fault)
    options.rules = Rules(
        restarts_group=options.restart == "group",
        max_restarts=options.max_restarts,
        min_workers=options.min_workers,
        delay_s=1.0 if options.restart_delay is None else options.restart_delay,
    )
    return options


def version_of(distribution: str) -> str:
    """Returns an installed version, also that of a nightly build."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        others = packages_distributions().get(distribution, ())
        return next(map(version, others), "of unknown version")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tw-launch",
        description="Starts the tasks of a TensorFlow cluster, on this machine or, "
        "with one command on each, on several.\nDefaults are in parentheses.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        *("-n", "-np"),
        dest="np",
        type=_positive,
        help="number of ranks: workers on a single machine, without parameter servers",
    )
    parser.add_argument(
        "--ps",
        type=_count,
        help="number of parameter servers, all on node 0; 0 starts workers alone (1, "
        "or 0 with -n, --mpi or --horovod)",
    )
    parser.add_argument(
        "--workers",
        type=_count,
        help="replicas on this machine; the first of the run is the chief (2)",
    )
    own = f"tw-launch {version_of('tw-launch')}"
    parser.add_argument("--version", action="version", version=own)
    parser.add_argument(
        "--mpi",
        action="store_true",
        help="make the workers one MPI world: faster on one machine; needs "
        "mpi4py and MPICH: pip install mpi4py mpich",
    )
    for name, default, meaning in _COUNTS:
        parser.add_argument(
            name, type=_count, default=default, help=f"{meaning} ({default})"
        )
    parser.add_argument(
        "--min-workers",
        type=_positive,
        help="continue if this many workers are left when others fail for good (all)",
    )
    parser.add_argument(
        "--gpus-per-task",
        type=_count,
        help="GPUs for each worker (an equal share of all); other tasks get none",
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
        "--log-dir",
        type=Path,
        help="folder for each task's output, e.g. worker-1.0.log for its first start",
    )
    _add_restarts(parser)
    _add_machines(parser)
    _add_horovod(parser)
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        help="run this module with Python; its arguments follow",
        metavar="MODULE",
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help="command that every task runs, after --",
        metavar="COMMAND",
    )
    return parser


def _add_restarts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--restart",
        choices=("task", "group"),
        default="task",
        help="restart only the task that failed, or all tasks as a group (task)",
    )
    parser.add_argument(
        "--restart-delay",
        type=_seconds,
        help="seconds before all tasks are restarted; doubled each time, up to 30 (1)",
    )


def _add_machines(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several machines", "one command on each")
    group.add_argument(
        "--nnodes", type=_positive, default=1, help="number of machines (1)"
    )
    group.add_argument(
        "--node-rank", type=_count, default=0, help="rank of this machine, from 0 (0)"
    )
    group.add_argument(
        "--coordinator",
        type=_host_and_port,
        help="address at which node 0 listens for the others",
        metavar="HOST:PORT",
    )
    group.add_argument(
        "--key-file",
        type=Path,
        help="file with the key that all machines share, readable by its owner alone "
        "(the environment variable TW_KEY)",
    )
    group.add_argument(
        "--address",
        default="",
        type=lambda host: host.removeprefix("[").removesuffix("]"),
        help="host at which other machines reach this one's tasks (node 0: the "
        "coordinator's host; others: their own end of the connection to it)",
    )
    group.add_argument(
        "--start-timeout",
        type=_seconds,
        default=300.0,
        help="seconds within which all machines must join (300)",
    )
    group.add_argument(
        "--node-timeout",
        type=_seconds,
        default=30.0,
        help="seconds of silence after which a machine counts as lost (30)",
    )


def _add_horovod(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("programs written for Horovod")
    group.add_argument(
        "--horovod",
        action="store_true",
        help="no servers; tasks that import horovod get tw_horovod",
    )
    hosts = ("-H", "--hosts", "-hostfile", "--hostfile")
    group.add_argument(*hosts, dest="hosts", help=argparse.SUPPRESS)


def _fault_of_counts(options: argparse.Namespace) -> str:
    """Describes the first contradiction in counts; empty if there is none."""
    faults = {
        "-H and --hostfile are horovodrun's; run tw-launch on each machine, with "
        "--nnodes N, --node-rank I, --coordinator HOST:PORT of node 0, and --workers "
        "for the slots": options.hosts is not None,
        f"-n {options.np} starts ranks, which have no parameter servers; got --ps "
        f"{options.ps}: drop one, or use --workers for -n": (
            options.np is not None and bool(options.ps)
        ),
        "--horovod has no parameter servers; drop --ps": (
            options.horovod and bool(options.ps)
        ),
        f"-n {options.np} counts the ranks of all machines; with --nnodes use "
        "--ps 0 --workers, which counts this machine's": (
            options.np is not None and options.nnodes > 1
        ),
        f"-n {options.np} and --workers {options.workers} differ; drop one": (
            None not in (options.np, options.workers) and options.np != options.workers
        ),
    }
    return next((fault for fault, is_so in faults.items() if is_so), "")


def _fault(options: argparse.Namespace) -> str:
    """Describes the first invalid option or combination; empty if there is none."""
    rank, nodes, workers = options.node_rank, options.nnodes, options.min_workers
    # Each message with the condition under which it applies.
    faults = {
        "COMMAND is missing; put it after --, or a module after -m": not (
            options.command if options.module is None else options.module
        ),
        "--evaluators must be 0 or 1": options.evaluators > 1,
        f"--node-rank must be below --nnodes {nodes}; got {rank}": rank >= nodes,
        "--nnodes above 1 needs --coordinator HOST:PORT, node 0's, on every machine": (
            nodes > 1 and options.coordinator is None
        ),
        "--isolate keeps the tasks out of other machines' reach; drop it or --nnodes": (
            nodes > 1 and options.isolate
        ),
        "--node-timeout must be above 0": not options.node_timeout,
        "--workers >= 1 is needed on a single machine; got 0": (
            nodes == 1 and options.workers < 1
        ),
        f"--min-workers must not be above --workers {options.workers}; got {workers}": (
            nodes == 1 and (workers or 0) > options.workers
        ),
    }
    if options.restart == "group":
        faults[
            "--restart group needs --max-restarts, 1 or more"
        ] = not options.max_restarts
        faults["--restart group needs all workers; drop --min-workers"] = (
            workers is not None
        )
    else:
        faults["--restart-delay is for --restart group"] = (
            options.restart_delay is not None
        )
    if options.mpi:
        faults |= _faults_of_mpi(options)
    for fault, is_so in faults.items():
        if is_so:
            return fault
    program = options.command[0]
    return "" if shutil.which(program) else f"COMMAND {program!r} cannot be run"


def _faults_of_mpi(options: argparse.Namespace) -> dict[str, bool]:
    return {
        "--mpi is for workers that exchange sums; parameter servers take no part in "
        f"them, so drop --ps {options.ps}": options.ps > 0,
        "--mpi is for one machine; start the program with your cluster's mpiexec, not "
        "with --nnodes": options.nnodes > 1,
        "--mpi cannot restart a single worker; use --restart group": (
            options.restart == "task" and options.max_restarts > 0
        ),
        "--mpi cannot continue without a worker; drop --min-workers": (
            options.min_workers is not None
        ),
        "--mpi needs mpi4py and MPICH: pip install mpi4py mpich": (
            importlib.util.find_spec("mpi4py") is None
        ),
    }


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


def _host_and_port(text: str) -> tuple[str, int]:
    try:
        return split_address(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT; got {text!r}") from None
