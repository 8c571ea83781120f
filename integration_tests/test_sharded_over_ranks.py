"""Optimizers whose state is in shards over ranks train as one device does."""

import os
from importlib.util import find_spec

import keras
import numpy as np
import pytest
import rank_batches
import rank_sharded
import rank_training
from harness.keras_optimizers import CASES, KINDS, present
from harness.ranks import Raised
from hypothesis import given, settings
from hypothesis import strategies as st

SHAPES = {"2 x 1": (2, 1), "2 x 2": (2, 2), "3 x 1": (3, 1)}  # ranks, towers
SOME = ["global_clipnorm", "clipnorm", "use_ema", "weight_decay"]
OPTIMIZERS = [
    *present(*(name for name in KINDS if name != "MultiOptimizer")),
    *(f"Adam {option}" for option in [*SOME, "gradient_accumulation_steps"]),
]
WITH_FILES = [
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adam use_ema", "AdamW", "Ftrl"),
    "Adam gradient_accumulation_steps",
    *("Lamb", "Lion", "LossScaleOptimizer", "Nadam", "RMSprop", "SGD momentum"),
]
PROGRAMS = [
    *("sparse gradients", "two optimizers", "several steps in one call", "eagerly"),
    *("accumulated, scaled", "overflowing losses", "counting"),
    *("losses added", "float16", "compiled by XLA", "stops early", "synchronised"),
    *("evaluates", "compiled again", "momentum, weights", "recorded"),
]
UNEVEN = [
    "recorded",
    "compiled again",
    "no batch at first",
    "no rows",
    "until one stops",
]


def assert_near(results, want, within=2e-6):
    for got in results:
        assert rank_sharded.near(got, want) < within
        np.testing.assert_equal(got[1], results[0][1])  # weights, bit for bit


@pytest.mark.full(
    *("2 x 2-Adam", "3 x 1-Lamb", "2 x 2-LossScaleOptimizer", "2 x 1-Adam use_ema"),
    *("2 x 2-Adam global_clipnorm", "3 x 1-Adafactor", "2 x 2-ScheduleFreeAdamW"),
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_optimizer_trains_shards_as_one_device(groups, shape, optimizer):
    size, towers = SHAPES[shape]
    results = groups(size).call("rank_sharded:optimized", optimizer, towers)
    want = rank_sharded.optimized(None, optimizer, 1)
    assert_near([got[:2] for got in results], want[:2])
    # Counts, rates, and a number that stands for no variable.
    bound = want[2] / size + 0.02 * want[2] + 100
    if optimizer.startswith("Adam ") and " clipnorm" not in optimizer:  # all are cut
        assert max(got[2] for got in results) < bound


@pytest.mark.full(
    *("2 x 2-sparse gradients", "3 x 1-two optimizers", "2 x 2-accumulated, scaled"),
)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_program_gives_what_it_gives_on_one_device(groups, shape, name):
    size, towers = SHAPES[shape]
    results = groups(size).call("rank_sharded:train", name, towers)
    own = rank_training.CASES[name].get("is_close", 2e-6)
    want = rank_training.train(None, name, 1)
    assert_near([got[:2] for got in results], want[:2], own)


@pytest.mark.skipif(not find_spec("mpi4py"), reason="mpi4py is not installed")
@pytest.mark.full("2-two optimizers")
@pytest.mark.parametrize("name", ["sparse gradients", "two optimizers", "accumulated"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_fit_over_mpi_is_that_of_one_device(groups, size, name):
    results = groups(size, "mpi").call("rank_sharded:train", name, 2)
    assert_near([got[:2] for got in results], rank_training.train(None, name, 1)[:2])


@pytest.mark.full("no batch at first-2")
@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("name", UNEVEN)
def test_batches_of_ones_own_give_what_they_give_joined(groups, name, towers):
    results = groups(2).call("rank_sharded:on_own", name, towers)
    assert_near(results, rank_batches.on_own(None, name, 1))


ROWS = st.lists(st.integers(0, 3), max_size=4)


def has_rows(of_ranks):
    steps = range(max(map(len, of_ranks)))
    return steps and all(sum(sum(own[n : n + 1]) for own in of_ranks) for n in steps)


@pytest.mark.full
@pytest.mark.parametrize("size", [11, 12])
def test_more_than_ten_ranks_own_parts_in_their_order(groups, size):
    """TensorFlow orders tasks by name, 10 before 2."""
    rows = [[rank % 3 + 1, rank % 2] for rank in range(size)]
    results = groups(size).call("rank_sharded:on_any", rows, 1, True)
    assert_near(results, rank_batches.on_any(None, rows, 1, True))
    if rank_training.BATCH % size == 0:
        results = groups(size).call("rank_sharded:optimized", "Adam", 1)
        want = rank_sharded.optimized(None, "Adam", 1)
        assert_near([got[:2] for got in results], want[:2])


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.timeout(900)
@settings(max_examples=10 if os.environ.get("TOWERS_TESTS") == "full" else 3)
@given(data=st.data())
def test_any_numbers_of_batches_and_rows(groups, is_known, data):
    size, towers = data.draw(st.sampled_from([(2, 1), (2, 2), (3, 1)]))
    rows = data.draw(st.lists(ROWS, min_size=size, max_size=size).filter(has_rows))
    results = groups(size).call("rank_sharded:on_any", rows, towers, is_known)
    assert_near(results, rank_batches.on_any(None, rows, 1, is_known))


@pytest.mark.full(
    *("2 x 2-Adam", "3 x 1-LossScaleOptimizer"),
    "2 x 2-Adam gradient_accumulation_steps",
)
@pytest.mark.parametrize("optimizer", WITH_FILES)
@pytest.mark.parametrize("shape", SHAPES)
def test_files_are_those_of_one_device(groups, shape, optimizer, tmp_path):
    size, towers = SHAPES[shape]
    folders = [tmp_path / name for name in ("sharded", "plain")]
    for folder in folders:
        folder.mkdir()
    paths = list(map(str, folders))
    results = groups(size).call("rank_sharded:saved", optimizer, towers, paths[0])
    assert_near(results, rank_sharded.saved(None, optimizer, 1, paths[1]))
    _, end, again, restored = results[0]
    np.testing.assert_equal(again, end)  # after loading
    np.testing.assert_equal(restored, end)  # from a backup, as if undisturbed
    for name in ("epoch.keras", "end.keras"):
        models = [keras.models.load_model(folder / name) for folder in folders]
        states = [[v.numpy() for v in own.optimizer.variables] for own in models]
        for own, plain in zip(*states, strict=True):  # sums of squares are large
            np.testing.assert_allclose(own, plain, rtol=2e-6, atol=2e-6)
    # Any other number of ranks and towers goes on from it.
    path = f"{paths[0]}/end.keras"
    results = groups(5 - size).call("rank_sharded:loaded", path, 3 - towers)
    assert_near(results, rank_sharded.loaded(None, path, 1))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        *[("MultiOptimizer", "holds several optimizers")] * ("MultiOptimizer" in CASES),
        ("flat", "use flat_below_bytes=0"),
        ("frequency", "ModelCheckpoint saves between batches.*got 2"),
        ("swap", "SwapEMAWeights reads the optimizer's variables itself"),
    ],
)
def test_what_shards_cannot_do_is_refused(groups, kind, says):
    with pytest.raises(Raised, match=says):
        groups(2).call("rank_sharded:refused", kind)
