"""A group that is killed and started again ends with an undisturbed run's variables.

Bit for bit: what was trained since the last checkpoint is trained again, on the same
rows, and sums are added up in the same order.
"""

import os
import random
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from harness.ports import find_free_ports
from harness.processes import TAG, Program, tagged
from launching import run_forked
from process_program import PROGRAMS, SAVE_EVERY

PROGRAM = Path(__file__).parent / "process_program.py"
LAUNCH = [sys.executable, "-m", "tw_launch", "--ps", "0"]
AGAIN = ["--restart", "group", "--max-restarts", "3", "--restart-delay", "0.1"]
RANKS, STEPS = 3, 24
DEADLINE_S = 250


def program(mode, folder, *more):
    return ["--", sys.executable, PROGRAM, mode, folder, "--steps", STEPS, *more]


def run(*words, deadline_s=DEADLINE_S):
    status, output = run_forked(
        [*LAUNCH, *map(str, words)], deadline_s=deadline_s, cwd=PROGRAM.parent
    )
    assert status == 0, output
    return output


def final_variables(folder):
    """Returns the variables of every rank."""
    found = []
    for rank in range(RANKS):
        with np.load(folder / f"final-{rank}.npz") as arrays:
            found.append([arrays[name] for name in arrays.files])
    return found


def expect_equal(folder, wanted):
    """All ranks have the wanted bits."""
    for own in final_variables(folder):
        for got, want in zip(own, wanted, strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Returns a function from a mode to what a run comes to that nobody disturbs."""
    known = {}

    def find(mode):
        if mode not in known:
            folder = tmp_path_factory.mktemp(mode)
            run("--workers", RANKS, *program(mode, folder))
            known[mode] = final_variables(folder)[0]
            expect_equal(folder, known[mode])
            assert any(np.any(array) for array in known[mode])
        return known[mode]

    return find


def draw_kills(seed):
    """Returns whom to kill in the first start, and in the second rank 0."""
    draw = random.Random(seed)
    first = f"0:{draw.randrange(1, RANKS)}:{draw.randrange(SAVE_EVERY + 1, 12)}"
    return ["--kill", first, f"1:0:{draw.randrange(12, STEPS - 1)}"]


def steps_begun_with(output):
    """Returns the step with which each start of the group began."""
    found = re.findall(r"rank 0, start (\d+): from step (\d+)", output)
    return {int(start): int(step) for start, step in found}


@pytest.mark.full("session")
@pytest.mark.timeout(2 * DEADLINE_S + 30)
@pytest.mark.parametrize("mode", PROGRAMS)
def test_killed_ranks_change_no_bit(tmp_path, undisturbed, mode):
    wanted = undisturbed(mode)
    kills = draw_kills(mode)
    output = run("--workers", RANKS, *AGAIN, *program(mode, tmp_path, *kills))
    begun = steps_begun_with(output)
    assert sorted(begun) == [0, 1, 2], output
    assert 0 == begun[0] < SAVE_EVERY <= begun[1] < begun[2], output
    expect_equal(tmp_path, wanted)


@pytest.mark.timeout(2 * DEADLINE_S + 30)
def test_killed_ranks_of_two_machines_change_no_bit(tmp_path, undisturbed):
    wanted = undisturbed("keras")
    (port,) = find_free_ports(1)
    meeting = ("--nnodes", 2, "--coordinator", f"127.0.0.1:{port}", *AGAIN)

    def run_node(node, workers):
        place = ("--node-rank", node, "--address", f"127.0.0.{node + 1}")
        whole = program("keras", tmp_path, *draw_kills("two machines"))
        return run("--workers", workers, *place, *meeting, *whole)

    with ThreadPoolExecutor(2) as pool:
        output, _ = pool.map(run_node, (0, 1), (RANKS - 1, 1))
    begun = steps_begun_with(output)
    assert sorted(begun) == [0, 1, 2], output
    assert begun[2] > 0, output
    expect_equal(tmp_path, wanted)


@pytest.mark.timeout(DEADLINE_S)
def test_ctrl_c_in_the_launcher_leaves_no_process(tmp_path):
    command = [*LAUNCH, "--workers", 2, *AGAIN, *program("keras", tmp_path)]
    command += ["--steps", 10**9]
    tag = f"{os.getpid()} {tmp_path}"
    env = {**os.environ, TAG: tag, "TF_CPP_MIN_LOG_LEVEL": "2"}
    with Program(command, cwd=PROGRAM.parent, env=env) as process:
        process.wait_for(r"(?s)(from step 0.*){2}", 100)
        assert len(tagged(tag)) >= 3
        process.send_signal(signal.SIGINT)
        process.finish()
        assert tagged(tag) == [], process.out
