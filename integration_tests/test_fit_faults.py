"""``fit`` over ranks, of which some are lost, stopped, interrupted, or only slow."""

import json
import os
import random
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fit_faults
import fit_program
import keras
import numpy as np
import pytest
import rank_fits
from harness.ports import find_free_ports
from harness.processes import IN_BACKGROUND, TAG, Program, tagged
from harness.ranks import Raised
from launching import run_forked

import tw_ranks
from tw_keras import TowerModel

TIMEOUT_S, GRACE_S = 2.0, 5.0
RANKS = 3
PROGRAM = Path(fit_program.__file__)
LAUNCH = [sys.executable, "-m", "tw_launch", "--ps", "0", "--workers", "2"]
AGAIN = ["--restart", "group", "--max-restarts", "3", "--restart-delay", "0.1"]
DEADLINE_S = 120


@pytest.fixture
def ranks(make_ranks):
    return make_ranks(RANKS, timeout_s=TIMEOUT_S).joined()


@pytest.mark.full("killed-0-step", "killed-1-idle itself", "stopped-1-validation")
@pytest.mark.parametrize("place", fit_faults.PLACES)
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("what", fit_faults.HARMS)
def test_all_name_the_rank_that_is_lost(ranks, tmp_path, place, lost, what):
    file = tmp_path / "when"
    for rank in ranks.all:
        rank.say("fit_faults:harmed", place, lost, what, str(file))
    for rank in ranks.all:
        if rank.rank == lost:
            continue
        with pytest.raises(Raised, match=rf"rank {lost} \(") as raised:
            rank.hear()
        error = raised.value
        assert error.kind == "RankTimeoutError"
        assert error.missing == [lost]
        named = re.findall(r"rank (\d+) \(", error.text)
        assert set(named) == {str(lost)}, error.text
        after_s = error.at_s - float(file.read_text())
        assert after_s <= GRACE_S + (TIMEOUT_S if what == "stopped" else 0.0)


@pytest.mark.full("fills its buffer-1")
@pytest.mark.parametrize("busy", [0, 1])
@pytest.mark.parametrize("what", ["predicts", "saves", "validates", "fills its buffer"])
def test_a_rank_that_is_busy_is_not_lost(ranks, tmp_path, what, busy):
    assert fit_faults.BUSY_S > 1.5 * TIMEOUT_S
    found = ranks.call("fit_faults:busy", what, busy, str(tmp_path))
    assert found == [3] * RANKS


def run_two(folder, *more):
    """Runs two ranks by themselves; returns the status and the output of each."""
    (port,) = find_free_ports(1)

    def run(rank):
        place = ["--place", f"127.0.0.1:{port}", str(rank), "2"]
        command = [sys.executable, str(PROGRAM), str(folder), *place, *more]
        return run_forked(command, deadline_s=DEADLINE_S)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


@pytest.mark.full("interrupt-1", "train step-0", "callback-1")
@pytest.mark.timeout(DEADLINE_S + 30)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", fit_program.FAULTS)
def test_an_error_or_ctrl_c_of_one_rank_ends_all(tmp_path, what, rank):
    began_s = time.monotonic()
    found = run_two(tmp_path, "--fault", what, str(rank))
    (status, own), (other_status, other) = found[rank], found[1 - rank]
    assert status == other_status == 1, own + other
    if "interrupt" in what:
        assert "\nKeyboardInterrupt" in own, own
    else:
        assert "a fault of its own" in own, own
    assert "RankTimeoutError" not in own, own
    why = {
        "step": r"has ended by an error of its own \(InvalidArgumentError\)",
        "interrupt": r"(was interrupted \(SIGINT\)|.* \(KeyboardInterrupt\))",
        "interrupt in a callback": r"has ended .* \(KeyboardInterrupt\)",
    }.get(what, r"has ended by an error of its own \(ValueError\)")
    assert re.search(rf"rank {rank} \(.*\) {why}", other), other
    assert "rank 0 has saved" in found[0][1]
    assert (tmp_path / "model.keras").exists()
    assert time.monotonic() - began_s < DEADLINE_S / 2


@pytest.mark.full("SIGTERM in the background")
@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize(
    ("start", "number"),
    [((), signal.SIGINT), (IN_BACKGROUND, signal.SIGTERM)],
    ids=["Ctrl-C", "SIGTERM in the background"],
)
def test_ctrl_c_in_the_launcher_lets_rank_0_save(tmp_path, start, number):
    command = [*start, *LAUNCH, *AGAIN, "--", sys.executable, PROGRAM, tmp_path]
    tag = f"{os.getpid()} {tmp_path}"
    env = {**os.environ, TAG: tag, "TF_CPP_MIN_LOG_LEVEL": "2"}
    with Program([*command, "--epochs", 10**6], env=env) as process:
        process.wait_for(r"(?s)(: epoch 1\n.*){2}", DEADLINE_S)
        assert len(tagged(tag)) >= 3
        process.send_signal(number)
        assert process.finish() == 128 + number, process.out
        assert tagged(tag) == [], process.out
        assert "rank 0 has saved" in process.out
        assert (tmp_path / "model.keras").exists()


def launch(folder, *more, restarts=()):
    """Runs two ranks by tw-launch to a good end; returns what was said."""
    command = [*LAUNCH, *restarts, "--", sys.executable, PROGRAM, folder, *more]
    status, output = run_forked(
        [str(word) for word in command], deadline_s=DEADLINE_S, cwd=PROGRAM.parent
    )
    assert status == 0, output
    return output


def read(folder):
    """Returns the history, and each rank's variables."""
    variables = []
    for rank in range(2):
        with np.load(folder / f"final-{rank}.npz") as arrays:
            variables.append([arrays[name] for name in arrays.files])
    return json.loads((folder / "history.json").read_text()), variables


def epochs_by_start(output):
    """Returns the epochs that rank 0 began in each start of the group."""
    found = {}
    for start, epoch in re.findall(r"rank 0, start (\d+): epoch (\d+)", output):
        found.setdefault(int(start), []).append(int(epoch))
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    launch(folder)
    return read(folder)


def draw_kills(seed):
    """Returns two kills at random moments, of random ranks."""
    draw = random.Random(seed)
    epochs = draw.randrange(-1, 3), draw.randrange(3, fit_program.EPOCHS - 2)
    return [
        f"{start}:{draw.randrange(2)}:{epoch}:{draw.uniform(0.0, 0.4):.4f}"
        for start, epoch in enumerate(epochs)
    ]


@pytest.mark.full("0")
@pytest.mark.timeout(2 * DEADLINE_S + 30)
@pytest.mark.parametrize("seed", range(10))
def test_ranks_killed_at_random_change_no_bit(tmp_path, undisturbed, seed):
    kills = draw_kills(seed)
    output = launch(tmp_path, "--kill", *kills, restarts=AGAIN)
    begun = epochs_by_start(output)
    assert max(begun) == 2, f"{kills}: {output}"
    wanted, wanted_variables = undisturbed
    history, variables = read(tmp_path)
    assert history["epochs"] == begun[2]
    assert wanted["epochs"][-len(begun[2]) :] == begun[2]
    for name, values in wanted.items():
        assert history[name] == values[-len(begun[2]) :], (name, kills)
    for own, want in zip(variables, wanted_variables, strict=True):
        for one, other in zip(own, want, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.fixture
def alone():
    group = tw_ranks.join()
    yield group
    group.leave()


def end_in_the_middle(path):
    """Writes half a file, as a process that is killed."""
    Path(path).write_bytes(b"half")
    raise KeyboardInterrupt


@pytest.mark.parametrize("file", ["weights", "epoch"])
@pytest.mark.parametrize("double", [False, True])
def test_a_backup_that_is_broken_off_leaves_the_last(
    tmp_path, monkeypatch, alone, file, double
):
    model = TowerModel(rank_fits.dense, ["/cpu:0"], group=alone)
    model.compile("adam", "mse")
    backup = keras.callbacks.BackupAndRestore(
        str(tmp_path), double_checkpoint=double, delete_checkpoint=False
    )
    x = np.ones([4, 4], np.float32)
    model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[backup])
    trained = model.get_weights()
    if file == "weights":
        name, new = "save_weights", lambda _, path, **__: end_in_the_middle(path)
        monkeypatch.setattr(keras.Model, name, new)
    else:  # The weights are written then.
        name, new = "dumps", lambda told: end_in_the_middle(tmp_path / "half")
        monkeypatch.setattr(json, name, new)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, x[:, :1], epochs=3, verbose=0, callbacks=[backup])
    monkeypatch.undo()
    assert json.loads((tmp_path / "training_metadata.json").read_text())["epoch"] == 2
    fresh = rank_fits.dense()
    fresh.load_weights(str(tmp_path / "latest.weights.h5"))
    for one, other in zip(fresh.get_weights(), trained, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_backup_within_an_epoch_says_which(tmp_path, alone):
    model = TowerModel(rank_fits.dense, ["/cpu:0"], group=alone)
    model.compile("adam", "mse")
    backup = keras.callbacks.BackupAndRestore(str(tmp_path), save_freq=1)

    def interrupt(batch, logs):
        if batch == 1:
            raise KeyboardInterrupt

    stop = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
    x, own = np.ones([8, 4], np.float32), [backup, stop]
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, x[:, :1], 2, 9, initial_epoch=7, verbose=0, callbacks=own)
    told = json.loads((tmp_path / "training_metadata.json").read_text())
    assert told == {"epoch": 7, "batch": 1}


@pytest.mark.full
@pytest.mark.timeout(DEADLINE_S + 30)
def test_an_epoch_begins_again_after_a_backup_within_it(tmp_path):
    kill = ("--kill", "0:0:2:0.15")
    output = launch(tmp_path, "--save-freq", "2", *kill, restarts=AGAIN)
    begun = epochs_by_start(output)
    assert sorted(begun) == [0, 1], output
    assert begun[1][0] in (begun[0][-1] - 1, begun[0][-1]), output
    history, variables = read(tmp_path)
    assert history["epochs"] == begun[1]
    assert begun[1][-1] == fit_program.EPOCHS - 1
    for one, other in zip(*(own[-14:] for own in variables), strict=True):
        np.testing.assert_array_equal(one, other)
