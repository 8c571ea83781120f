"""The command line of ``tw-doctor``."""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path

from tw_reduce._measured import version_of

_EXAMPLES = """\
examples:
  tw-doctor                                  what holds here, and how fast it is
  tw-doctor --towers 8 --json machine.json   then all_reduce(devices, measured=...)
  tw-doctor --device cpu --checks-only       what holds, in seconds
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line, this process's by default."""
    parser = argparse.ArgumentParser(
        prog="tw-doctor",
        description="Checks on this machine's devices what the towers packages "
        "promise, and measures copies, reducers and scaling. Ends with status 1 where "
        "something does not hold.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--towers",
        type=_towers,
        help="how many, 2 or more; several share a GPU where there are fewer GPUs, "
        "and CPUs are logical ones (every GPU, or 2)",
        metavar="K",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="where the towers are: on GPUs where there are some (auto)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="write all of it there, for `measured=` of auto and all_reduce",
        metavar="FILE",
    )
    parser.add_argument("--checks-only", action="store_true", help="measure nothing")
    parser.add_argument(
        "--measure-for",
        type=_seconds,
        default=math.inf,
        help="seconds to measure once the checks are made (all that the limit leaves)",
        metavar="S",
    )
    parser.add_argument(
        "--time-limit",
        type=_seconds,
        default=120.0,
        help="seconds after which it ends, whatever is left to do (120)",
        metavar="S",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=30.0,
        help="seconds after which a single check or measurement counts as hung (30)",
        metavar="S",
    )
    parser.add_argument(
        "--version", action="version", version=f"tw-reduce {version_of('tw-reduce')}"
    )
    options = parser.parse_args(arguments)
    if options.json is not None and (fault := _unwritable(options.json)):
        parser.error(f"argument --json: {fault}")
    return options


def _unwritable(path: Path) -> str:
    """Returns why a file cannot be written, before two minutes are spent."""
    if path.is_dir():
        return f"{path} is a folder"
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if not os.access(path if path.exists() else folder, os.W_OK):
        return f"{path} cannot be written"
    return ""


def _towers(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"must be 2 or more; got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be seconds above 0; got {text!r}")
    return seconds
