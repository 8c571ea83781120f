"""Programs of others that were written for Horovod, in short; ``nox -s clients``: long.

Two processes of ``tw-launch --horovod`` train each with its own command.
"""

from importlib.util import find_spec

import numpy as np
import pytest
from lab.clients import deepmd, deepxde

pytestmark = pytest.mark.slow

STEPS = 20


def test_deepxde_solves_the_same_on_both_ranks(tmp_path):
    (tmp_path / "solve.py").write_text(deepxde.PROGRAM)
    first, second = deepxde.solve(tmp_path, STEPS, workers=2)
    assert np.all(np.isfinite(first))
    # Each rank drew points and initial weights of its own.
    np.testing.assert_array_equal(first, second)


@pytest.mark.skipif(not find_spec("deepmd"), reason="nox -s full installs DeePMD-kit")
def test_deepmd_learns_on_two_ranks(tmp_path):
    deepmd.write_system(tmp_path / "train", frames=8, seed=0)
    deepmd.write_system(tmp_path / "valid", frames=20, seed=1)
    work = tmp_path / "work"
    deepmd.train(work, tmp_path, STEPS, batch=1, seed=1, workers=2)
    rows = np.genfromtxt(work / "lcurve.out", names=True)
    assert rows["rmse_val"][-1] < rows["rmse_val"][0]
