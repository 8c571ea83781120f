"""Files that are written beside and moved: a kill leaves the old ones whole."""

import os
import signal
import subprocess
import sys
from inspect import signature

import keras
import numpy as np
import pytest
from tower_models import CPUS

from tw_keras import TowerModel
from tw_reduce import compression

# Saves twice; the second save is killed at the n-th call of the function named.
PROGRAM = """
import os, shutil, signal, sys
import keras
import numpy as np
from tw_core import use_logical_cpus
from tw_keras import TowerModel
from tw_reduce import compression

path, killed, number = sys.argv[1], sys.argv[2], int(sys.argv[3])

def make():
    return keras.Sequential([keras.Input([99]), keras.layers.Dense(99)])

reducer = compression.error_feedback(compression.top_k(0.1))
model = TowerModel(make, use_logical_cpus(2), reducer=reducer)
model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(8, 99))
for n in range(2):
    model.fit(x, x, verbose=0)
    model.set_weights([np.full(own.shape, n + 1.0) for own in model.get_weights()])
    save = model.save if path.endswith(".keras") else model.save_weights
    if n == 1:
        module = {"replace": os, "close": keras.src.saving.saving_lib.H5IOStore}[killed]
        before, count = getattr(module, killed), [0]
        def kill(*arguments, **options):
            count[0] += 1
            if count[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return before(*arguments, **options)
        setattr(module, killed, kill)
    save(path)
"""
KILLS = {  # where, and whose weights are found then
    "while the model is written": ("close", 1, 1.0),
    "before the first move": ("replace", 1, 1.0),
    "between the moves": ("replace", 2, 1.0),
}


def make():
    return keras.Sequential([keras.Input([99]), keras.layers.Dense(99)])


def made(**options):
    model = TowerModel(make, CPUS[:2], **options)
    model.compile("sgd", "mse")
    return model


def hidden(folder):
    return [own for own in os.listdir(folder) if own.startswith(".")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5"])
@pytest.mark.parametrize("when", KILLS)
def test_a_kill_leaves_a_model_that_loads(tmp_path, caplog, when, name):
    path, (killed, number, wanted) = tmp_path / name, KILLS[when]
    command = [sys.executable, "-c", PROGRAM, str(path), killed, str(number)]
    ended = subprocess.run(command, timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    model = made(reducer=compression.error_feedback(compression.top_k(0.1)))
    model.load_weights(path)
    assert {own.min() for own in model.get_weights()} == {wanted}
    lines = [own for own in caplog.messages if "was saved with other weights" in own]
    assert len(lines) == (when == "between the moves")  # recognised as no pair
    model.save_weights(tmp_path / "m.weights.h5")
    model.save(tmp_path / "m.keras")
    assert hidden(tmp_path) == []


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    model, path = made(), tmp_path / "m.keras"
    model.save(path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr(keras.src.saving.saving_lib.H5IOStore, "close", fail)
    with pytest.raises(OSError, match="no space"):
        model.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.keras"]


def test_links_and_modes_stay(tmp_path):
    model, path = made(), tmp_path / "m.keras"
    path.touch(mode=0o640)
    path.chmod(0o640)
    (tmp_path / "link.keras").symlink_to(path)
    model.save(tmp_path / "link.keras")
    assert (tmp_path / "link.keras").is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert keras.models.load_model(path).count_params() == 9_900


def test_an_answer_not_to_overwrite_is_obeyed(tmp_path, monkeypatch):
    model, path = made(), tmp_path / "m.weights.h5"
    model.save_weights(path)
    before = path.read_bytes()
    monkeypatch.setattr("builtins.input", lambda _: "n")
    model.set_weights([own + 1 for own in model.get_weights()])
    model.save_weights(path, overwrite=False)
    assert path.read_bytes() == before


def test_files_in_parts_find_each_other(tmp_path):
    if "max_shard_size" not in signature(keras.Model.save_weights).parameters:
        pytest.skip("this version of Keras writes no files in parts")

    def wide():
        dense = keras.layers.Dense
        return keras.Sequential([keras.Input([512]), *map(dense, [512, 512, 512])])

    model = TowerModel(wide, CPUS[:2])
    path = tmp_path / "m.weights.json"
    model.save_weights(path, max_shard_size=0.0015)
    assert len(os.listdir(tmp_path)) > 2
    other = TowerModel(wide, CPUS[:1])
    other.load_weights(path)
    for one, two in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_memory_of_older_weights_stays_as_long_as_they_do(tmp_path, monkeypatch):
    path, memory = tmp_path / "m.weights.h5", tmp_path / "m.weights.h5.reducer.npz"
    path.touch()
    memory.touch()

    def fail(*_):
        raise OSError("no permission")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="permission"):
        patch.setattr(os, "replace", fail)
        made().save_weights(path)
    assert memory.exists()
    made().save_weights(path)
    assert os.listdir(tmp_path) == ["m.weights.h5"]


def test_a_path_that_keras_refuses_is_refused_by_keras(tmp_path):
    with pytest.raises(ValueError, match="filename must end in"):
        made().save_weights(tmp_path / "m.bin")
    with pytest.raises(FileNotFoundError):
        made().save(tmp_path / "none" / "m.keras")
