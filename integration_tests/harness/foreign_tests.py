"""Tests of another project, unchanged: run apart, and compared with a list.

Those that end otherwise are in a .toml file beside the program, each with a reason.
"""

import argparse
import ast
import contextlib
import io
import os
import re
import signal
import tempfile
import time
import tomllib
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.processes import make_template

Run = Callable[[Path, str], tuple[str, str]]
"""Runs a test of a file; returns its outcome and its output."""


def main(
    project: str,
    files: Sequence[str],
    run: Run,
    *,
    deviations: Path,
    may_skip: bool = False,
) -> int:
    """Runs the tests of a checkout; returns 0 if only the listed ones fail.

    Args:
      project: the name of the project.
      files: paths in the checkout.
      run: runs a test.
      deviations: a .toml file, whose table ``deviations`` has a reason for each test
        that fails.
      may_skip: whether a test that is skipped counts as one that passes.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path, nargs="?")
    parser.add_argument("--only", default="", help="regular expression for test names")
    options = parser.parse_args()
    if options.checkout is None:
        print(f"No test ran: give a checkout of {project} after --.")
        return 0
    known = tomllib.loads(deviations.read_text())["deviations"]
    good = ("passed", "skipped") if may_skip else ("passed",)
    found: dict[str, str] = {}
    for path in files:
        file = (options.checkout / path).resolve()
        for name in read_names(file):
            if re.search(options.only, name):
                found[name], output = run(file, name)
                print(f"{found[name]:<8} {name}", flush=True)
                if found[name] not in good and name not in known:
                    print(output, flush=True)
    print(", ".join(f"{count} {how}" for how, count in Counter(found.values()).items()))
    wrong = judge(found, known, good=good, is_all=not options.only)
    wrong += [] if found else ["no test was found"]
    for line in wrong:
        print(line)
    return 1 if wrong else 0


def read_names(file: Path) -> list[str]:
    """Lists the tests of a file by pytest's names."""
    return [
        f"{case.name}::{test.name}"
        for case in ast.parse(file.read_text()).body
        if isinstance(case, ast.ClassDef)
        for test in case.body
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test")
    ]


def judge(
    found: Mapping[str, str],
    known: Mapping[str, str],
    *,
    good: Sequence[str],
    is_all: bool,
) -> list[str]:
    """Returns the differences between outcomes and the list of those that fail."""
    failed = {name for name, how in found.items() if how not in good}
    return [
        *(f"not listed: {name} {found[name]}" for name in sorted(failed - set(known))),
        *(
            f"listed, but {found[name]}: {name}"
            for name in sorted((set(known) & set(found)) - failed)
        ),
        *(
            f"listed, but not found: {name}"
            for name in sorted(set(known) - set(found) if is_all else ())
        ),
    ]


def run_apart(
    target: Callable[..., None],
    arguments: Sequence[tuple[Any, ...]],
    *,
    deadline_s: float,
) -> tuple[str, str]:
    """Calls ``target(path, *arguments[i])`` in process i; kills what has not ended.

    Args:
      target: writes an outcome to the first line of ``path``, and the output after
        it.
      arguments: one tuple per process.
      deadline_s: for all processes, in seconds.

    Returns:
      The outcome that all processes have, "unlike", "crashed" or "hung", and their
      output.
    """
    context = make_template()
    until = time.monotonic() + deadline_s
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(i) for i in range(len(arguments))]
        processes = [
            context.Process(target=_lead, args=(target, path, *own))
            for path, own in zip(paths, arguments, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        late = [process for process in processes if process.is_alive()]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        said = [path.read_text() if path.exists() else "" for path in paths]
    hows = {text.partition("\n")[0] for text in said}
    crashed = any(process.exitcode for process in processes)
    how = "hung" if late else "crashed" if crashed else "unlike"
    if not late and not crashed and len(hows) == 1:
        [how] = hows
    return how, "\n".join(said)


def _lead(target: Callable[..., None], *arguments: Any) -> None:
    """Makes its process the leader of a group, which can be killed as one."""
    os.setsid()
    target(*arguments)


def run_test(path: Path, test: str, *options: str) -> None:
    """Runs a test by pytest, and writes its outcome and output to ``path``."""
    import pytest

    reports: list[str] = []
    notes = types.SimpleNamespace(
        pytest_runtest_logreport=lambda report: reports.append(report.outcome)
    )
    words = ["-q", "--tb=short", "-p", "no:cacheprovider", "--rootdir", path.parent]
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(out),
    ):
        pytest.main([*map(str, words), *options, "-c", os.devnull, test], [notes])
    # A test reports for each of its modes.
    how = next((one for one in ("failed", "skipped") if one in reports), "passed")
    path.write_text(f"{how if reports else 'missing'}\n{out.getvalue()}")
