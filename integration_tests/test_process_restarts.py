"""A group that is killed and started again ends with an undisturbed run's variables.

Bit for bit: what was trained since the last checkpoint is trained again, on the same
rows, and sums are added up in the same order.
"""

import json
import os
import random
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from harness.launching import run_forked
from harness.ports import find_free_ports
from harness.processes import IN_BACKGROUND, TAG, Program, tagged
from programs.restart_program import EPOCHS, FAULTS, SAVE_EVERY, STEPS

HERE = Path(__file__).parent
LAUNCH = [sys.executable, "-m", "tw_launch", "--ps", "0"]
AGAIN = ["--restart", "group", "--max-restarts", "3", "--restart-delay", "0.1"]
RANKS = {"fit": 2, "sharded": 3, "session": 3}
DEADLINE_S = 250
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * DEADLINE_S + 30)]


def command(folder, mode, *more):
    return [sys.executable, "-m", "programs.restart_program", mode, str(folder), *more]


def launch(folder, mode, *more, workers=0, options=()):
    """Runs ranks to a good end; returns what rank 0 began in each start of the group.

    And what was said.
    """
    words = [*LAUNCH, "--workers", str(workers or RANKS[mode]), *options, "--"]
    whole = [*words, *command(folder, mode, *more)]
    status, said = run_forked(whole, deadline_s=DEADLINE_S, cwd=HERE)
    assert status == 0, said
    begun = {}
    for start, number in re.findall(r"rank 0, start (\d+): \w+ (\d+)", said):
        begun.setdefault(int(start), []).append(int(number))
    return begun, said


def read(folder, mode):
    """Returns the variables of every rank."""
    variables = []
    for rank in range(RANKS[mode]):
        with np.load(folder / f"final-{rank}.npz") as arrays:
            variables.append([arrays[name] for name in arrays.files])
    return variables


def read_history(folder):
    return json.loads((folder / "history.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Mode -> the folder of a run that nobody disturbs."""

    @cache
    def find(mode):
        folder = tmp_path_factory.mktemp(mode)
        launch(folder, mode)
        return folder

    return find


def draw_kills(seed, mode):
    """Returns two kills at random moments; in a session the second one is of rank 0."""
    draw = random.Random(seed)
    if mode != "session":
        numbers = draw.randrange(-1, 3), draw.randrange(3, EPOCHS - 2)
        ranks, most_s = [draw.randrange(2) for _ in numbers], 0.4
    else:
        numbers = draw.randrange(SAVE_EVERY + 1, 12), draw.randrange(12, STEPS - 1)
        ranks, most_s = [draw.randrange(1, 3), 0], 0.01
    return [
        f"{start}:{rank}:{number}:{draw.uniform(0.0, most_s):.4f}"
        for start, (rank, number) in enumerate(zip(ranks, numbers, strict=True))
    ]


@pytest.mark.parametrize(
    ("mode", "seed"),
    [("session", 0), *((m, s) for m in ("fit", "sharded") for s in range(10))],
)
def test_ranks_killed_at_random_change_no_bit(tmp_path, undisturbed, mode, seed):
    kills = draw_kills(seed, mode)
    begun, said = launch(tmp_path, mode, "--kill", *kills, options=AGAIN)
    assert max(begun) == 2, f"{kills}: {said}"
    np.testing.assert_equal(read(tmp_path, mode), read(undisturbed(mode), mode))
    if mode == "session":
        assert 0 == begun[0][0] < SAVE_EVERY <= begun[1][0] < begun[2][0], said
        return
    wanted, history = read_history(undisturbed(mode)), read_history(tmp_path)
    assert history["epochs"] == begun[2]
    for name, values in wanted.items():
        assert history[name] == values[-len(begun[2]) :], (name, kills)


def test_killed_ranks_of_two_machines_change_no_bit(tmp_path):
    """Compared with two machines, as the ranks of each add first."""

    def run(folder, *more):
        folder.mkdir()
        (port,) = find_free_ports(1)
        meeting = ("--nnodes", "2", "--coordinator", f"127.0.0.1:{port}", *AGAIN)

        def run_node(node, workers):
            place = ("--node-rank", str(node), "--address", f"127.0.0.{node + 1}")
            options = (*place, *meeting)
            return launch(folder, "session", *more, workers=workers, options=options)

        with ThreadPoolExecutor(2) as pool:
            first, _ = pool.map(run_node, (0, 1), (2, 1))
        return first

    begun, said = run(tmp_path / "undisturbed")
    assert sorted(begun) == [0], said
    begun, said = run(
        tmp_path / "killed", "--kill", *draw_kills("two machines", "session")
    )
    assert sorted(begun) == [0, 1, 2], said
    assert begun[2][0] > 0, said
    wanted = read(tmp_path / "undisturbed", "session")
    np.testing.assert_equal(read(tmp_path / "killed", "session"), wanted)


def test_an_epoch_begins_again_after_a_backup_within_it(tmp_path):
    more = ("--save-freq", "2", "--kill", "0:0:2:0.15")
    begun, said = launch(tmp_path, "fit", *more, options=AGAIN)
    assert sorted(begun) == [0, 1], said
    assert begun[1][0] in (begun[0][-1] - 1, begun[0][-1]), said
    assert read_history(tmp_path)["epochs"] == begun[1]
    assert begun[1][-1] == EPOCHS - 1
    one, other = (own[-14:] for own in read(tmp_path, "fit"))
    np.testing.assert_equal(one, other)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", FAULTS)
def test_an_error_or_ctrl_c_of_one_rank_ends_all(tmp_path, what, rank):
    (port,) = find_free_ports(1)

    def run(own):
        place = ("--place", f"127.0.0.1:{port}", str(own), "2")
        words = command(tmp_path, "fit", *place, "--fault", what, str(rank))
        return run_forked(words, deadline_s=DEADLINE_S / 4, cwd=HERE)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    (status, own), (other_status, other) = found[rank], found[1 - rank]
    assert status == other_status == 1, own + other
    if "interrupt" in what:
        assert "\nKeyboardInterrupt" in own, own
    else:
        assert "a fault of its own" in own, own
    assert "RankTimeoutError" not in own, own
    why = {
        "step": r"has ended with an exception \(InvalidArgumentError\)",
        "interrupt": r"(was interrupted \(SIGINT\)|.* \(KeyboardInterrupt\))",
        "interrupt in a callback": r"has ended .* \(KeyboardInterrupt\)",
    }.get(what, r"has ended with an exception \(ValueError\)")
    assert re.search(rf"rank {rank} \(.*\) {why}", other), other
    assert "rank 0 has saved" in found[0][1]
    assert (tmp_path / "model.keras").exists()


@pytest.mark.parametrize(
    ("start", "number"),
    [((), signal.SIGINT), (IN_BACKGROUND, signal.SIGTERM)],
    ids=["Ctrl-C", "SIGTERM in the background"],
)
def test_ctrl_c_in_the_launcher_lets_rank_0_save_and_leaves_no_process(
    tmp_path, start, number
):
    words = [*start, *LAUNCH, "--workers", "2", *AGAIN, "--"]
    words += command(tmp_path, "fit", "--epochs", "1000000")
    tag = f"{os.getpid()} {tmp_path}"
    env = {**os.environ, TAG: tag, "TF_CPP_MIN_LOG_LEVEL": "2"}
    with Program(words, env=env, cwd=HERE) as process:
        process.wait_for(r"(?s)(: epoch 1\n.*){2}", 120)
        assert len(tagged(tag)) >= 3
        process.send_signal(number)
        assert process.finish() == 128 + number, process.out
        assert tagged(tag) == [], process.out
        assert "rank 0 has saved" in process.out
        assert (tmp_path / "model.keras").exists()
