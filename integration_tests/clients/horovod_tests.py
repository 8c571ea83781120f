"""Horovod's own tests of ``horovod.tensorflow``, on two processes of these packages.

``nox -s "clients(horovod_tests)" -- CHECKOUT`` runs its ``test/parallel/
test_tensorflow.py``, unchanged, each test in two fresh processes with the environment
of ``tw-launch --horovod``, and with Keras 2, for which they were written. Every failing
test must be in ``horovod_tests.toml``, with a reason. Without a checkout of Horovod
0.28 no test runs.
"""

import argparse
import ast
import contextlib
import io
import os
import re
import signal
import sys
import tempfile
import tomllib
import types
from collections import Counter
from pathlib import Path
from typing import Any

from harness.ports import find_free_ports
from harness.processes import make_template

from tw_launch._launcher.messages import Start
from tw_launch._launcher.plan import Share, find_horovod, plan_tasks

FILE = "test/parallel/test_tensorflow.py"
DEVIATIONS = Path(__file__).with_suffix(".toml")
RANKS = 2
DEADLINE_S = 600


def main() -> int:
    """Runs the tests; 0 where just the listed ones fail."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, nargs="?")
    parser.add_argument("--only", default="", help="regular expression for test names")
    options = parser.parse_args()
    if options.checkout is None:
        print("No test ran: give a checkout of Horovod after --.")
        return 0
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    file = (options.checkout / FILE).resolve()
    known = tomllib.loads(DEVIATIONS.read_text())["deviations"]
    found: dict[str, str] = {}
    for name in read_names(file):
        if re.search(options.only, name):
            found[name], said = run(file, name)
            print(f"{found[name]:<8} {name}", flush=True)
            if found[name] not in ("passed", "skipped") and name not in known:
                print(said, flush=True)
    failed = {n for n, how in found.items() if how not in ("passed", "skipped")}
    print(", ".join(f"{count} {how}" for how, count in Counter(found.values()).items()))
    for name in sorted(failed - set(known)):
        print(f"not listed: {name} {found[name]}")
    for name in sorted((set(known) & set(found)) - failed):
        print(f"listed, but {found[name]}: {name}")
    return 0 if failed == set(known) & set(found) else 1


def read_names(file: Path) -> list[str]:
    """Lists the tests of the file, as pytest names them."""
    return [
        f"{case.name}::{test.name}"
        for case in ast.parse(file.read_text()).body
        if isinstance(case, ast.ClassDef)
        for test in case.body
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test")
    ]


def run(file: Path, name: str) -> tuple[str, str]:
    """Runs one test on all ranks; returns how it ended, and what was said."""
    addresses = tuple(f"127.0.0.1:{port}" for port in find_free_ports(RANKS))
    share = Share(0, RANKS, 0, (None,) * RANKS, horovod=find_horovod())
    plans = plan_tasks(share, Start(0, {"worker": addresses}, 0, "run"))
    context = make_template()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(plan.index) for plan in plans]
        processes = [
            context.Process(
                target=run_rank, args=(f"{file}::{name}", dict(plan.variables), path)
            )
            for plan, path in zip(plans, paths, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(DEADLINE_S)
        late = [process for process in processes if process.is_alive()]
        for process in late:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        said = [path.read_text() if path.exists() else "" for path in paths]
    hows = {text.partition("\n")[0] for text in said}
    crashed = any(process.exitcode for process in processes)
    how = "hung" if late else "crashed" if crashed else "unlike"
    if not late and not crashed and len(hows) == 1:
        [how] = hows
    return how, "\n".join(said)


def run_rank(test: str, variables: dict[str, str], path: Path) -> None:
    """In a process of its own: runs a test, and writes how it ended and was said."""
    os.setsid()
    os.environ.update(variables)
    # What a fresh Python reads of the environment, a forked one has to be told.
    sys.path.insert(0, find_horovod())
    import horovod.tensorflow as hvd
    import pytest

    _add_modules()
    hvd.init()  # Some tests leave it to those before them.
    reports: list[str] = []
    notes = types.SimpleNamespace(
        pytest_runtest_logreport=lambda report: reports.append(report.outcome)
    )
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "--rootdir", path.parent]
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(out),
    ):
        pytest.main([*map(str, options), "-c", os.devnull, test], plugins=[notes])
    # A test reports for each of its modes.
    how = next((one for one in ("failed", "skipped") if one in reports), "passed")
    path.write_text(f"{how if reports else 'missing'}\n{out.getvalue()}")


def _add_modules() -> None:
    """Adds private modules of Horovod that its tests import, and what these use."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    def never(**_: Any) -> None:
        raise NotImplementedError("horovod.runner")

    contents = {
        "horovod.tensorflow.util": {"_executing_eagerly": tf.executing_eagerly},
        "horovod.runner": {},
        "horovod.runner.util": {},
        "horovod.runner.util.threads": {"in_thread": never},
        "cloudpickle": {},
        "mock": {},
    }
    hvd._executing_eagerly = tf.executing_eagerly
    for name, names in contents.items():
        module = types.ModuleType(name)
        vars(module).update(names, __path__=[])
        sys.modules[name] = module
    hvd.util = sys.modules["horovod.tensorflow.util"]


if __name__ == "__main__":
    sys.exit(main())
