"""Commands answer help and wrong options without importing TensorFlow.

``test_benchmark_commands.py`` has those of the benchmarks. What stands in a folder of
its own, as the examples do, is run by its path.
"""

import os
import re
import subprocess
import sys

import pytest
from harness.docs_blocks import ROOT

MODULES = {
    "tw-launch": "tw_launch",
    "tw-doctor": "tw_doctor",
    "soak": "lab.soak.run",
    "faults": "lab.faults.run",
    "interfaces": "interfaces",
    "publish": "publish",
    "planted": "structure.planted",
    "limits": "structure.limits",
    "weight": "structure.weight",
    "pieces": "interfaces.pieces",
    "horovod table": "programs.horovod_table",
    "keras gallery": "programs.keras_gallery",
    "conformance": "conformance.page",
}
PATHS = [
    *ROOT.glob("integration_tests/lab/clients/*.py"),
    *(p for p in ROOT.glob("docs/examples/**/*.py") if "__main__" in p.read_text()),
]
COMMANDS = MODULES | {str(p.relative_to(ROOT)): str(p) for p in PATHS}
FOLDERS = ("integration_tests", "docs")
# Imports of these fail, in a process that has none yet. Both options in one process:
# what takes long is its start.
START = """
import runpy, sys
sys.modules.update(dict.fromkeys(["tensorflow", "keras"]))
name = sys.argv[1]
is_path = name.endswith(".py")
if is_path:
    sys.path.insert(0, name.rpartition("/")[0])
for option in ("--help", "--no-such-option"):
    sys.argv[:] = [name, option]
    try:
        if is_path:
            runpy.run_path(name, run_name="__main__")
        else:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        sys.stdout.flush()
        print(option, "ends with", end.code, file=sys.stderr)
"""


@pytest.mark.slow(by_day=["tw-launch", "tw-doctor"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_answers_help_and_refuses_a_wrong_option_without_tensorflow(name):
    folders = os.pathsep.join(str(ROOT / folder) for folder in FOLDERS)
    done = subprocess.run(
        [sys.executable, "-c", START, COMMANDS[name]],
        env={**os.environ, "PYTHONPATH": folders},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
    help_said, _, refusal = done.stderr.partition("--help ends with 0\n")
    assert help_said.strip() == ""
    assert refusal.endswith("\n--no-such-option ends with 2\n"), done.stderr
    assert re.search(r"error: |Unrecognized options", refusal)
    assert "Traceback" not in refusal
