"""A group that was forgotten is noticed, and nothing else is taken for that."""

import json
import sys
import types
import warnings

import keras
import numpy as np
import pytest
from tower_models import CPUS

from tw_keras import TowerModel
from tw_keras._over_ranks import forgotten

PORTS = ["localhost:1", "localhost:2"]
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}


def tf_config(job, **cluster):
    config = {"cluster": cluster, "task": {"type": job, "index": 0}}
    return {"TF_CONFIG": json.dumps(config)}


SEVERAL = {
    "tw-launch": tf_config("worker", worker=PORTS),
    "chief and worker": tf_config("worker", chief=PORTS[:1], worker=PORTS[1:]),
    "beside an evaluator": tf_config("worker", worker=PORTS, evaluator=PORTS[:1]),
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    "MPICH": {"PMI_RANK": "0", "PMI_SIZE": "2"},
    "srun": {**STEP, "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "2"},
    "srun, of a job": {**STEP, "SLURM_NTASKS": "2"},
    "MPI, an empty TF_CONFIG": {"TF_CONFIG": "{}", "PMI_RANK": "0", "PMI_SIZE": "2"},
}
ALONE = {
    "nothing": {},
    "one worker": tf_config("worker", worker=PORTS[:1]),
    "parameter servers": tf_config("chief", chief=PORTS[:1], worker=PORTS, ps=PORTS),
    "an evaluator": tf_config("evaluator", worker=PORTS, evaluator=PORTS[:1]),
    "one of MPI": {"PMI_RANK": "0", "PMI_SIZE": "1"},
    "one of Slurm": {**STEP, "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"},
    "a batch script": {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
    "a shell": {**STEP, "SLURM_STEP_ID": str(2**32 - 6), "SLURM_NTASKS": "4"},
    "no JSON": {"TF_CONFIG": "{"},
    "no cluster": {"TF_CONFIG": '{"task": {"type": "worker", "index": 0}}'},
    "a list": {"TF_CONFIG": "[]"},
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_processes_are_found(name):
    launcher, count = forgotten.find_launcher(SEVERAL[name])
    assert count == 2
    assert launcher


@pytest.mark.parametrize("name", ALONE)
def test_a_process_that_trains_alone_is_not_taken_for_one_of_several(name):
    assert forgotten.find_launcher(ALONE[name]) is None


@pytest.fixture
def fits(monkeypatch):
    """Fits a model twice under a launcher; returns the warnings."""
    for name, value in SEVERAL["tw-launch"].items():
        monkeypatch.setenv(name, value)
    for name in [*sys.modules]:
        if name.startswith(("tw_ranks", "tw_horovod", "horovod")):
            monkeypatch.delitem(sys.modules, name)
    forgotten.warn_if_forgotten.cache_clear()

    def fit():
        model = TowerModel(
            lambda: keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]),
            CPUS[:2],
        )
        model.compile("sgd", "mse")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model.fit(np.ones([4, 2]), np.ones([4, 1]), verbose=0)
        return [own for own in caught if "TowerModel" in str(own.message)]

    yield fit
    forgotten.warn_if_forgotten.cache_clear()


def test_a_process_of_several_is_warned_once_at_its_own_line(fits):
    (caught,) = fits()
    assert "has started 2 processes, but this one has joined no" in str(caught.message)
    assert "TowerModel(..., group=group)" in str(caught.message)
    assert caught.filename == __file__
    assert fits() == []


@pytest.mark.parametrize("name", ["tw_ranks._group", "horovod.tensorflow"])
def test_a_process_that_has_joined_is_not_warned(name, fits, monkeypatch):
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert fits() == []


def test_what_only_a_group_uses_is_refused_without_one():
    def make():
        return keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])

    with pytest.raises(ValueError, match="='shared' needs a group of ranks; pass gr"):
        TowerModel(make, CPUS[:2], data="shared")
    with pytest.raises(ValueError, match="='shared' and uneven='stop' need a group"):
        TowerModel(make, CPUS[:2], data="shared", uneven="stop")
