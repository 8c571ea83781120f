"""The cluster example: one program for all tasks, started by tw-launch."""

import re
import sys
from pathlib import Path

import pytest
from harness.launching import run_forked

pytestmark = pytest.mark.slow

TRAIN = Path(__file__).parents[1] / "docs/examples/cluster/train.py"
DEADLINE_S = 150


@pytest.mark.timeout(DEADLINE_S + 30)
def test_two_workers_learn_digits_and_all_tasks_end(tmp_path):
    pytest.importorskip("sklearn")
    # A server that did not end when asked to would hold the launch for the grace.
    launch = [sys.executable, "-m", "tw_launch", "--grace", str(DEADLINE_S)]
    program = [sys.executable, str(TRAIN), "--steps", "101"]
    program += ["--checkpoints", str(tmp_path)]
    status, out = run_forked([*launch, "--", *program], deadline_s=DEADLINE_S)
    assert status == 0, out
    assert "[worker 0] worker 0 has ended" in out
    assert "[worker 1] worker 1 has ended" in out
    shares = [float(share) for share in re.findall(r"step 50: ([\d.]+) %", out)]
    assert shares and shares[0] > 60
    assert (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("option", ["--steps=0", "--batch=-1", "--wait-timeout=nan"])
def test_wrong_options_are_refused_before_a_server_starts(option):
    pytest.importorskip("sklearn")
    status, out = run_forked([sys.executable, str(TRAIN), option], deadline_s=60)
    flag, _, value = option.partition("=")
    assert status == 2, out
    assert f"error: {flag} must be above 0; got {value}" in out
    assert "Traceback" not in out
