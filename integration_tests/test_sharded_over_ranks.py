"""Optimizers whose state is in shards over ranks train as one device does."""

import keras
import numpy as np
import pytest
from harness.keras_optimizers import CASES, KINDS, present
from harness.ranks import Raised
from programs import rank_batches, rank_sharded, rank_training

pytestmark = pytest.mark.slow

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


def assert_near(results, want, within=2e-6):
    for got in results:
        assert rank_sharded.near(got, want) < within
        np.testing.assert_equal(got[1], results[0][1])  # weights, bit for bit


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


@pytest.mark.parametrize("option", ["global_clipnorm", "clipnorm"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_that_a_batch_reads_twice_are_clipped_as_on_one_device(
    groups, shape, option
):
    size, towers = SHAPES[shape]
    results = groups(size).call("rank_sharded:clipped", f"Adam {option}", towers)
    assert_near(results, rank_sharded.clipped(None, f"Adam {option}", 1), 2e-5)


@pytest.mark.parametrize("size", [11, 12])
def test_more_than_ten_ranks_own_parts_in_their_order(groups, size):
    """TensorFlow orders tasks by name, 10 before 2."""
    rows = [[rank % 3 + 1, rank % 2] for rank in range(size)]
    results = groups(size).call("rank_batches:on_any", rows, 1, True, "sharded")
    assert_near(results, rank_batches.on_any(None, rows, 1, True))
    if rank_training.BATCH % size == 0:
        results = groups(size).call("rank_sharded:optimized", "Adam", 1)
        want = rank_sharded.optimized(None, "Adam", 1)
        assert_near([got[:2] for got in results], want[:2])


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
        ("frequency", "ModelCheckpoint saves between batches.*got 2"),
        ("swap", "SwapEMAWeights reads the optimizer's variables itself"),
    ],
)
def test_what_shards_cannot_do_is_refused(groups, kind, says):
    with pytest.raises(Raised, match=says):
        groups(2).call("rank_sharded:refused", kind)
