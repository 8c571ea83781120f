"""``fit`` over ranks, of which some are lost, stopped or slow; and its backups."""

import json
import re
from pathlib import Path

import keras
import numpy as np
import pytest
from harness.ranks import Raised
from programs import fit_faults, rank_training

import tw_ranks
from tw_keras import TowerModel

pytestmark = pytest.mark.slow

# A busy machine silences living ranks for seconds, and delays what they raise.
TIMEOUT_S, GRACE_S = 15.0, 30.0
LONG_S = 120.0
"""Of a deadline that no test waits for."""
RANKS = 3


@pytest.mark.slow(by_day=["killed-1-sharded"])
@pytest.mark.parametrize("place", fit_faults.PLACES)
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("what", fit_faults.HARMS)
def test_all_name_the_rank_that_is_lost(make_ranks, tmp_path, place, lost, what):
    timeout_s = TIMEOUT_S if what == "stopped" else LONG_S
    ranks = make_ranks(RANKS, timeout_s=timeout_s).joined()
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
        assert after_s <= GRACE_S + (timeout_s if what == "stopped" else 0.0)


@pytest.mark.parametrize("busy", [0, 1])
def test_a_rank_that_is_busy_is_not_lost(make_ranks, busy):
    ranks = make_ranks(RANKS, timeout_s=TIMEOUT_S).joined()
    assert fit_faults.BUSY_S > 1.5 * TIMEOUT_S
    assert ranks.call("fit_faults:busy", busy) == [3] * RANKS


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
    model = TowerModel(rank_training.dense, ["/cpu:0"], group=alone)
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
    fresh = rank_training.dense()
    fresh.load_weights(str(tmp_path / "latest.weights.h5"))
    np.testing.assert_equal(fresh.get_weights(), trained)


def test_a_backup_within_an_epoch_says_which(tmp_path, alone):
    model = TowerModel(rank_training.dense, ["/cpu:0"], group=alone)
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
