"""Runs a benchmark by name: python run.py NAME [options]; NAME --help lists them.

A benchmark is a file with ``OPTIONS`` and ``main(options, report)``. The options are
read from its source, and its module is imported only once they are valid: help and
errors in options appear at once, without TensorFlow. ``OPTIONS`` maps each name to a
literal: its default; a tuple of names to choose from, all by default; the path of a
dictionary whose keys are such names, as ``"profiles.PROFILES"``; or a dictionary of
arguments of ``add_argument``.
"""

import argparse
import ast
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
HERE = Path(__file__).parent
HELP = {
    "within": "seconds after which it ends and names the parts left",
    "epochs": "epochs to trace",
    "groups": "groups of contenders, or numbers of micro-batches per update",
    "keep": "folder for the doctor's files",
    "lists": "words in the names of gradient lists",
    "device": "kind of the towers' devices: GPUs if there are any (auto)",
    "models": "models to train",
    "parts": "parts to run",
    "only": "only this group, or contenders whose names contain these words",
    "processes": "numbers of processes",
    "profiles": "lists of gradients",
    "ranks": "numbers of ranks",
    "rounds": "maximum number of turns of each contender",
    "servers": "numbers of parameter servers",
    "sizes": "sizes of variables or tensors",
    "tensors": "tensors of the exchange that ranks describe",
    "tickets": "tickets waiting when the chief's round begins",
    "timed_steps": "steps for which the server's time is measured",
    "torch": "a Python that has PyTorch",
    "towers": "numbers of towers",
    "widths": "widths of square kernels",
    "workers": "numbers of workers",
    "networks": "networks whose first step or epoch is timed",
    "first_towers": "numbers of towers of these networks",
    "works": "works to run",
}


def names() -> list[str]:
    """Lists the benchmarks."""
    return sorted(path.stem for path in HERE.glob("*.py") if "OPTIONS" in _read(path))


def parse(name: str, arguments: list[str]) -> argparse.Namespace:
    """Reads the options of a benchmark, without importing it."""
    constants = _read(HERE / f"{name}.py")
    parser = argparse.ArgumentParser(
        prog=f"run.py {name}",
        description=constants["__doc__"],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for option, given in ast.literal_eval(constants["OPTIONS"]).items():
        flag = f"--{option.replace('_', '-')}"
        parser.add_argument(flag, help=HELP[option], **_keywords(given))
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Imports the benchmark's module, calls its ``main``, and writes its report."""
    known = names()
    if arguments[:1] in (["-h"], ["--help"]):
        print(f"{__doc__}\nBenchmarks: {', '.join(known)}.")
        return
    if not arguments or arguments[0] not in known:
        sys.exit(f"run.py: name a benchmark, one of {known}; got {arguments[:1]}.")
    options = parse(arguments[0], arguments[1:])
    sys.path[:0] = [str(HERE), str(HERE.parents[1])]
    report = importlib.import_module("racing").Report(arguments[0])
    importlib.import_module(arguments[0]).main(options, report)
    if report.rows or report.notes:  # Counts alone give nothing to draw.
        report.write()
    if report.faults:
        sys.exit(f"run.py {arguments[0]}: {'; '.join(report.faults)}")


def _keywords(given: Any) -> dict[str, Any]:
    if isinstance(given, dict):
        keywords = dict(given)
        keywords["choices"] = _choices(given["choices"])
        return keywords
    if isinstance(given, str | tuple):
        choices = _choices(given)
        return {"nargs": "*", "choices": choices, "default": choices}
    if isinstance(given, list):
        kind = int if given and isinstance(given[0], int) else str
        return {"nargs": "*", "type": kind, "default": given}
    return {"type": int if isinstance(given, int) else str, "default": given}


def _choices(given: str | tuple[str, ...]) -> list[str]:
    """Returns the names, or the keys of the dictionary at ``module.NAME``."""
    if isinstance(given, tuple):
        return list(given)
    module, _, name = given.partition(".")
    keys = _read(HERE / f"{module}.py")[name].keys
    return [ast.literal_eval(key) for key in keys]


def _read(path: Path) -> dict[str, Any]:
    """Returns a module's docstring and the expressions of its constants, not run."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: dict[str, Any] = {"__doc__": ast.get_docstring(tree)}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            found[ast.unparse(target)] = node.value
    return found


if __name__ == "__main__":
    interrupts: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        main(sys.argv[1:])
    except BaseException:  # NumPy makes another error of an interrupted import.
        if not interrupts:
            raise
        print("run.py: interrupted; no report was written", file=sys.stderr)
        sys.exit(130)
