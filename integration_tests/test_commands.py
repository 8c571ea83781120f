"""Commands answer help and wrong options without importing TensorFlow.

``test_benchmark_commands.py`` has those of the benchmarks. What stands in a folder of
its own, as the examples do, is run by its path.
"""

import os
import re
import subprocess
import sys

import pytest
from docs_blocks import ROOT

MODULES = {
    "tw-launch": "tw_syncrep.launch",
    "tw-doctor": "tw_reduce.doctor",
    "soak": "soak.run",
    "faults": "faults.run",
    "interfaces": "interfaces",
    "publish": "publish",
    "planted": "structure.planted",
    "shape": "structure.shape",
    "walks": "structure.walks",
    "weight": "structure.weight",
    "pieces": "interfaces.pieces",
    "horovod table": "horovod_table",
    "keras gallery": "keras_gallery",
    "conformance": "conformance.page",
}
PATHS = [
    *ROOT.glob("integration_tests/clients/*.py"),
    *(p for p in ROOT.glob("docs/examples/**/*.py") if "__main__" in p.read_text()),
]
COMMANDS = MODULES | {str(p.relative_to(ROOT)): str(p) for p in PATHS}
FOLDERS = ("integration_tests", "integration_tests/faults", "docs")
# Imports of these fail, in a process that has none yet.
START = """
import runpy, sys
sys.modules.update(dict.fromkeys(["tensorflow", "keras"]))
del sys.argv[0]
if sys.argv[0].endswith(".py"):
    sys.path.insert(0, sys.argv[0].rpartition("/")[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def start(name, option):
    folders = os.pathsep.join(str(ROOT / folder) for folder in FOLDERS)
    return subprocess.run(
        [sys.executable, "-c", START, COMMANDS[name], option],
        env={**os.environ, "PYTHONPATH": folders},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_answers_help_without_tensorflow(name):
    done = start(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_refuses_a_wrong_option_without_tensorflow(name):
    done = start(name, "--no-such-option")
    assert done.returncode == 2, done.stderr
    assert re.search(r"error: |Unrecognized options", done.stderr)
    assert "Traceback" not in done.stderr
