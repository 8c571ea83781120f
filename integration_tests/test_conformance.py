"""Every builder with every reducer, against one device on the whole batch.

By day each builder trains once.
"""

import re
from functools import cache, partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from conformance.models import DECAY, KINDS, oracle
from conformance.page import is_exact, table
from conformance.programs import Copies, in_function
from conformance.rows import Row, reducers, rows

import tw_builders
import tw_reduce
from tw_core.testing import CPUS
from tw_reduce.reducers import CollectiveKeys

PAGE = Path(__file__).parents[1] / "docs" / "conformance.md"
REDUCERS = list(reducers(CollectiveKeys()))
RESOLUTIONS = 8  # of the dtype, where a third was rounded


@cache
def trained(row: Row, num_towers: int) -> Copies:
    return row.run(num_towers)


def name_of(row: Row) -> str:
    return f"{row.builder}-{row.reducer}-{row.optimizer}".replace("…", "...")


CELLS = {
    f"{name_of(row)}-{kind}-{count}": (row, kind, count)
    for row in rows()
    for count in row.counts
    for kind in KINDS
}
# Of each builder, and of each way to apply gradients, one cell with all dtypes.
FIRST = {
    row.builder: name
    for name, (row, kind, count) in reversed(CELLS.items())
    if kind == "mixed" and (count == 2 or len(row.counts) == 1)
}


@pytest.mark.slow(by_day=[*FIRST.values()])
@pytest.mark.parametrize(("row", "kind", "num_towers"), CELLS.values(), ids=CELLS)
def test_towers_end_where_one_device_does(row, kind, num_towers):
    check_ends(row, kind, num_towers, trained(row, num_towers)[kind])


def check_ends(row, kind, num_towers, copies):
    """Compares all copies of the variables with NumPy."""
    want = oracle(
        kind,
        num_towers,
        average=row.average,
        decay=DECAY.get(kind, 0.0) if row.has_momentum else 0.0,
        stays_sparse=not row.moves_all_rows(num_towers),
    )
    assert len(copies) == (num_towers if row.is_replicated else 1)
    for copy in copies:
        for value, wanted, part in zip(copy, want, KINDS[kind], strict=True):
            assert value.dtype == part.dtype
            bound = RESOLUTIONS * float(ml_dtypes.finfo(value.dtype).eps)
            bound = 0 if is_exact(row, num_towers) else bound
            got = value.astype(np.float64)
            np.testing.assert_allclose(got, wanted, rtol=0, atol=bound)


IN_FUNCTIONS = [
    pytest.param(row, count, id=f"{name_of(row)}-{count}")
    for row in rows()
    if row.run.func is in_function
    for count in row.counts
]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "num_towers"), IN_FUNCTIONS)
def test_one_trace_has_the_bits_of_a_trace_for_each_tower(row, num_towers):
    once = row.run(num_towers, trace="once")
    each = trained(row, num_towers)
    assert once.keys() == each.keys()
    for kind in KINDS:
        pairs = zip(*map(tf.nest.flatten, (once[kind], each[kind])), strict=True)
        for own, other in pairs:
            np.testing.assert_array_equal(own, other, err_msg=kind)


@pytest.mark.slow(by_day=["apply_shared_gradients(average=False)--v1-4"])
@pytest.mark.parametrize(("row", "num_towers"), IN_FUNCTIONS)
def test_compiled_towers_end_where_one_device_does_or_say_why_not(row, num_towers):
    copies = row.run(num_towers, trace="once", jit_compile=True)
    for kind in KINDS:
        if row.is_compiled(kind, num_towers):
            check_ends(row, kind, num_towers, copies[kind])
            continue
        name = "TowerOptimizer" if "ampopt" in row.optimizer else r"[GM]\w+Optimizer"
        says = rf"jit_compile=True: {name} updates variables .*=False"
        assert re.match(says, str(copies[kind])), copies[kind]


def test_the_page_has_this_table():
    page = PAGE.read_text()
    missing = [line for line in table(rows()).splitlines() if line not in page]
    assert missing == []
    listed = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(listed) == len(rows())


def test_the_modes_hierarchical_and_nccl_are_refused_without_eight_towers_or_gpus():
    make = partial(tw_builders.SyncMultiGPUReplicatedBuilder, CPUS[:4], True)
    with pytest.raises(ValueError, match="eight towers; got 4"):
        make("hierarchical")
    with pytest.raises(ValueError, match=r"(?i)gpu"):
        make("nccl")


def test_the_table_has_every_reducer_of_the_package():
    made = {name for name in tw_reduce.__all__ if name.startswith("sum_")}
    made |= {"hierarchical", "auto", "packed", "broadcast", "compress", "accumulate_as"}
    named = " ".join(REDUCERS)
    assert {name for name in made if name not in named} == {"sum_nccl"}
