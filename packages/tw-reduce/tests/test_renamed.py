"""Old names and arguments work for one version, with a warning at the caller's line."""

import importlib
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import tw_reduce
from tw_core.checks import naming
from tw_core.testing import CPUS, run_in_graph
from tw_reduce import auto, packed, sum_collective, sum_on_device
from tw_reduce._renamed import NAMES  # the table itself
from tw_reduce.plans import TensorInfo, plan_auto, plan_packs
from tw_reduce.reducers import CollectiveKeys, check_reduced, check_tower_tensors

ON_FIRST = partial(sum_on_device, device=CPUS[0])
# 40 elements: 160 bytes of float32, 320 of float64.
INFOS = [
    TensorInfo(n, (40,), dtype, size)
    for n, (dtype, size) in enumerate([("float32", 4)] * 2 + [("float64", 8)] * 2)
]


@pytest.mark.parametrize("name", NAMES)
def test_an_old_name_gives_the_new_object_and_warns(name):
    home, _, new = NAMES[name].rpartition(".")
    with pytest.warns(DeprecationWarning, match=rf"tw_reduce\.{name} is .* use {home}"):
        old = getattr(tw_reduce, name)
    assert old is getattr(importlib.import_module(home), new)


def test_all_names_of_the_last_version_are_there():
    new = {"accumulate_as", "all_reduce", "broadcast", "compress", "partition"}
    assert len((set(tw_reduce.__all__) - new) | set(NAMES)) == 40


def takes_below(below):
    """Calls by the name of the function, with the old argument."""
    return {
        "plan_packs": lambda: plan_packs(INFOS, below=below),
        "plan_auto": lambda: plan_auto(INFOS, CPUS[:2], below=below),
        "packed": lambda: packed(ON_FIRST, below=below),
        "auto": lambda: auto(CPUS[:2], below=below),
    }


@pytest.mark.parametrize("name", takes_below(0))
def test_below_warns_and_takes_what_below_bytes_takes(name):
    with pytest.warns(DeprecationWarning, match=rf"{name}\(below=\.\.\.\) is"):
        takes_below(40)[name]()
    with (
        pytest.warns(DeprecationWarning),
        pytest.raises(ValueError, match="at least 0"),
    ):
        takes_below(-1)[name]()
    with pytest.warns(DeprecationWarning), pytest.raises(TypeError, match="number"):
        takes_below("40")[name]()


@pytest.mark.parametrize(("below", "count"), [(40, 0), (np.int64(41), 2)])
def test_below_still_counts_elements(below, count):
    with pytest.warns(DeprecationWarning):
        assert len(plan_packs(INFOS, below=below).packs) == count


@pytest.mark.parametrize(("below_bytes", "count"), [(160, 0), (161, 1), (321, 2)])
def test_below_bytes_counts_bytes(below_bytes, count):
    assert len(plan_packs(INFOS, below_bytes=below_bytes).packs) == count


def test_an_old_argument_beside_its_new_one_is_refused():
    with pytest.warns(DeprecationWarning), pytest.raises(TypeError, match="got both"):
        packed(ON_FIRST, below=1, below_bytes=4)


@pytest.mark.parametrize("seconds", [0.0, 30.0])
def test_timeout_seconds_warns_and_bounds_the_reduction(seconds):
    def reduce(grads):
        with pytest.warns(DeprecationWarning, match=r"\(timeout_seconds=\.\.\.\)"):
            sums = sum_collective(
                grads, devices=CPUS[:2], keys=CollectiveKeys(), timeout_seconds=seconds
            )
        ops = tf.compat.v1.get_default_graph().get_operations()
        bounds = {
            op.get_attr("timeout_seconds")
            for op in ops
            if op.type == "CollectiveReduce"
        }
        assert bounds == {seconds}
        return sums

    towers = [[np.full([3], k, np.float32)] for k in (1, 2)]
    for [total] in run_in_graph(reduce, towers):
        assert total.tolist() == [3, 3, 3]


CHECKS = {
    "check_tower_tensors": partial(check_tower_tensors, []),
    "check_reduced": partial(check_reduced, [[]], [[]] * 2),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_opens_its_message_with_the_name_it_is_lent(name):
    with pytest.raises(ValueError, match=f"^{name}: "):
        CHECKS[name]()
    with naming("mine"), pytest.raises(ValueError, match=r"^mine: "):
        CHECKS[name]()


@pytest.mark.parametrize("name", CHECKS)
def test_caller_warns_and_opens_the_message(name):
    with (
        pytest.warns(DeprecationWarning, match=rf"{name}\(caller=\.\.\.\) is .*naming"),
        pytest.raises(ValueError, match=r"^mine: "),
    ):
        CHECKS[name](caller="mine")
    for caller, error in {None: TypeError, "": ValueError}.items():
        with (
            pytest.warns(DeprecationWarning),
            pytest.raises(error, match="caller must"),
        ):
            CHECKS[name](caller=caller)
