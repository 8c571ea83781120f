"""Every row of Horovod's table, on two, three and eleven ranks, against NumPy."""

import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from harness.launching import run_forked
from programs.horovod_table import REFUSED, ROWS

import tw_horovod as hvd

pytestmark = pytest.mark.slow

DEADLINE_S = 250
# What trains is in the tests of tw-horovod, by what comes of training.
ELSEWHERE = {"broadcast_global_variables", "join", "shutdown"}


@pytest.fixture(scope="module", params=[2, 3, 11])
def ran(request, tmp_path_factory):
    """What each rank got in each row and mode, and how many ranks there were."""
    folder = tmp_path_factory.mktemp("table")
    table = Path(__file__).parent / "programs" / "horovod_table.py"
    program = [sys.executable, str(table)]
    launch = [sys.executable, "-m", "tw_launch", "--ps", "0"]
    status, said = run_forked(
        [*launch, "--workers", str(request.param), "--", *program, str(folder)],
        deadline_s=DEADLINE_S,
    )
    files = [folder / f"{rank}.pickle" for rank in range(request.param)]
    results = [pickle.loads(file.read_bytes()) for file in files if file.exists()]
    assert len(results) == request.param, said
    assert status == 0, f"{said}\nThe last row was {list(results[0])[-1]}."
    return results


@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name, row in ROWS.items() for mode in row.modes]
)
def test_a_row_gives_what_numpy_gives(ran, name, mode):
    row, size = ROWS[name], len(ran)
    brought = [row.brings(rank, size) for rank in range(size)]
    for rank, results in enumerate(ran):
        got = results[name, mode]
        assert isinstance(got, list), got
        for array, want in zip(got, row.wants(brought, rank), strict=True):
            assert (array.dtype, array.shape) == (want.dtype, want.shape)
            rtol = 1e-3 if want.dtype == np.float16 else 1e-6
            np.testing.assert_allclose(array, want, rtol=rtol)


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name, row in REFUSED.items() for mode in row.modes],
)
def test_a_row_that_ranks_do_not_share_is_refused_on_all(ran, name, mode):
    for results in ran:
        got = results[name, mode]
        assert isinstance(got, tuple), got
        assert re.search(REFUSED[name].refuses, got[1], re.DOTALL), got


def test_every_function_has_a_row():
    rows = ROWS | REFUSED
    covered = {name.split()[0] for name in rows}
    covered |= {other for row in rows.values() for other in row.covers}
    functions = {name for name in dir(hvd) if callable(getattr(hvd, name))}
    functions = {name for name in functions if name[0].islower()}
    assert functions - covered == ELSEWHERE
