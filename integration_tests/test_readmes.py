"""Every Python example of every README runs, with the wheels that users install."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEADLINE_S = 240


LAUNCH = re.compile(r"^    tw-launch (.*) -- python train\.py$", re.MULTILINE)


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.parent.name))
def test_the_examples_of_a_readme_run(path, tmp_path):
    text = path.read_text()
    blocks = BLOCK.findall(text)
    assert blocks, f"{path} has no Python example"
    launched = LAUNCH.search(text)
    command = (
        launch_as_train_py(blocks, launched[1], tmp_path)
        if launched
        else one_after_the_other(blocks, path.name)
    )
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def one_after_the_other(blocks, name):
    program = "\n".join(
        f"print('block {i}')\nexec(compile({block!r}, {name!r}, 'exec'), {{}})"
        for i, block in enumerate(blocks, start=1)
    )
    return ["-c", program]


def launch_as_train_py(blocks, options, folder):
    [block] = blocks
    (folder / "train.py").write_text(block)
    program = ["--", sys.executable, "train.py"]
    return ["-m", "tw_syncrep.launch", *options.split(), *program]


def test_the_test_command_of_the_readme_is_what_ci_runs():
    commands = re.findall(r"^```sh\n(.*?)\n```$", READMES[0].read_text(), re.MULTILINE)
    train, test = [command for command in commands if "nox" in command]
    assert train == f"{test} -s train"
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in ci if "nox" in line] == [test]
    for command in (train, test):
        assert not command.startswith(("$", "%", ">"))
        assert "\n" not in command
