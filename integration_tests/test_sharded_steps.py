"""Own steps with optimizer state in shards over ranks train as one device does."""

from importlib.util import find_spec

import numpy as np
import pytest
from harness.keras_optimizers import present
from harness.ranks import Raised
from programs import rank_own_steps, rank_sharded

pytestmark = pytest.mark.slow

SHAPES = {"2 x 1": (2, 1), "2 x 2": (2, 2), "3 x 1": (3, 1)}  # ranks, towers
OPTIMIZERS = present(
    *("Adam", "SGD momentum", "Lion", "Adafactor", "Lamb", "Muon", "Ftrl"),
    *("LossScaleOptimizer", "Adam global_clipnorm", "Adam clipnorm", "Adam use_ema"),
    *("AdamW weight_decay", "Adam gradient_accumulation_steps"),
)
NEAR = 2e-6


def check(results, want, near=NEAR):
    for got in results:
        assert rank_sharded.near(got, want) < near
        np.testing.assert_equal(got, results[0])  # bit for bit


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_train_as_one_device(groups, shape, optimizer):
    size, towers = SHAPES[shape]
    results = groups(size).call("rank_own_steps:trained", "dense", optimizer, towers)
    want, whole = rank_own_steps.trained(None, "dense", optimizer, 1)
    check([weights for weights, _ in results], want)
    if optimizer == "Adam":  # the rest is counts and a number for no variable
        assert max(own for _, own in results) < (1 / size + 0.02) * whole + 40


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        *(("dense", own) for own in ("weighs", "eagerly", "jit_compile")),
        ("narrow", "weighs"),
    ],
)
def test_ways_to_make_a_step(groups, kind, setting):
    results = groups(2).call("rank_own_steps:trained", kind, "Adam", 2, setting)
    want, _ = rank_own_steps.trained(None, kind, "Adam", 1)
    # The last place of a weight of 1 in float16 is 1e-3.
    check([got for got, _ in results], want, 2e-3 if kind == "narrow" else NEAR)


@pytest.mark.parametrize("optimizer", ["Adam", "SGD momentum", "Lamb"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("engine", ["tensorflow", "mpi"])
def test_sparse_gradients_over_processes(groups, engine, size, optimizer):
    if engine == "mpi" and not find_spec("mpi4py"):
        pytest.skip("mpi4py is not installed")
    call = ("rank_own_steps:trained", "words", optimizer, 2)
    results = groups(size, engine).call(*call)
    want, _ = rank_own_steps.trained(None, "words", optimizer, 1)
    check([weights for weights, _ in results], want)


@pytest.mark.parametrize("optimizer", ["Adam", "LossScaleOptimizer", "Lamb"])
@pytest.mark.parametrize("shape", SHAPES)
def test_checkpoints_are_those_of_one_device(groups, tmp_path, shape, optimizer):
    size, towers = SHAPES[shape]
    paths = [str(tmp_path / name) for name in ("sharded", "plain")]
    results = groups(size).call("rank_own_steps:restored", optimizer, towers, paths[0])
    want = rank_own_steps.restored(None, optimizer, 1, paths[1])
    check(results, want)
    for end, again in results:
        np.testing.assert_equal(again, end)
    for path in paths:  # each goes on from the other's
        check([rank_own_steps.continued(None, optimizer, 1, path)], want[0])
        call = ("rank_own_steps:continued", optimizer, 3 - towers, path)
        check(groups(5 - size).call(*call), want[0])


@pytest.mark.parametrize("what", ["towers", "shapes", "optimizers"])
def test_ranks_that_differ_are_refused(groups, what):
    says = "All ranks must have the same number.*got rank 0: .*; rank 1: 1 towers"
    with pytest.raises(Raised, match=says):
        groups(2).call("rank_own_steps:parting", what)


@pytest.mark.parametrize("of_ranks", ["a b", "ab bc", "a -"])
def test_ranks_that_lack_different_gradients_are_refused(groups, of_ranks):
    says = "without variables 0 .a.*rank 0 and gradients, .*float32.*rank 1"
    with pytest.raises(Raised, match=says):
        groups(2).call("rank_own_steps:without_gradients", *of_ranks.split())
    alike = groups(2).call("rank_own_steps:without_gradients", "b", "b")
    assert alike == [[[-2.0] * 6, [0.0] * 6, [-2.0] * 6]] * 2
