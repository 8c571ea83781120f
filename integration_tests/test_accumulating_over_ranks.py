"""Optimizers that accumulate, over towers and in shards, exchange once per update."""

from importlib.util import find_spec

import numpy as np
import pytest
from harness.ranks import Raised
from programs import rank_accumulating

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", rank_accumulating.CASES)
@pytest.mark.parametrize("towers", [1, 2])
def test_ranks_train_as_one_device(groups, towers, name):
    size = len(rank_accumulating.CASES[name]["rows"])
    results = groups(size).call("rank_accumulating:train", name, towers)
    assert_alike(results, name, towers)


@pytest.mark.skipif(not find_spec("mpi4py"), reason="mpi4py is not installed")
@pytest.mark.parametrize(
    "name", ["memory, rows", "scaled", "several steps in one call"]
)
def test_ranks_train_over_mpi_as_one_device(groups, name):
    results = groups(2, "mpi").call("rank_accumulating:train", name, 2)
    assert_alike(results, name, 2)


def assert_alike(results, name, towers):
    is_each = "is_each" in rank_accumulating.CASES[name]
    want = rank_accumulating.train(None, name, len(results) * towers if is_each else 1)
    for history, weights, counts, progress, means in results:
        np.testing.assert_allclose(history, want[0], 2e-6, 1e-6)
        for own, other in zip([*weights, *means], [*want[1], *want[4]], strict=True):
            np.testing.assert_allclose(own, other, 2e-6, 2e-6)
        assert counts == pytest.approx(want[2], rel=2e-6)
        assert progress == want[3]
        np.testing.assert_equal(weights, results[0][1])


@pytest.mark.parametrize("towers", [1, 2])
def test_ranks_take_the_state_of_rank_0_as_fit_begins(groups, towers):
    want = rank_accumulating.resume(None, towers)
    for state in groups(2).call("rank_accumulating:resume", towers):
        for own, other in zip(state, want, strict=True):
            np.testing.assert_allclose(own, other, 2e-6, 2e-6)


# Weight, rows, a batch, to stop, and more, before the forward pass; the model.
REPORT, WEIGHTS = 5 * 8, 4 * (4 + 1)
REPORTS, STATE = 2 * 4 * 8, 12  # of two ranks; a momentum for the model, count and rate
# Steps of an update, options of a tower optimizer, if a callback looks, of the model.
EXCHANGED = {
    "each step": (None, None, False, {}, [REPORT, WEIGHTS] * 8),
    "accumulated": (4, None, False, {}, [REPORT, REPORT, REPORT, REPORT, WEIGHTS] * 2),
    "by towers": (4, {}, False, {}, [REPORT, REPORT, REPORT, REPORT, WEIGHTS] * 2),
    "by towers, looked at": (4, {}, True, {}, [REPORT, WEIGHTS] * 8),
    "dropped together": (
        *(4, {"on_nonfinite": "drop_micro_batch"}, False, {}),
        [REPORT, 4, REPORT, 4, REPORT, 4, REPORT, 4, WEIGHTS] * 2,
    ),
    # A reduce-scatter and an all-gather; then, for a callback that may save, what the
    # state of each rank is, and an all-gather of it.
    "shards": (
        *(4, None, False, {"variables": "sharded"}),
        [*([REPORT] * 4 + [WEIGHTS] * 2) * 2, 64, WEIGHTS],
    ),
    "shards looked at": (
        *(4, None, True, {"variables": "sharded"}),
        [*([REPORT, WEIGHTS] * 4 + [WEIGHTS]) * 2, 64, WEIGHTS],
    ),
    # The optimizer's state, as an epoch ends.
    "local steps": (
        *(None, None, False, {"local_steps": (4,)}),
        [REPORTS, WEIGHTS, REPORTS, WEIGHTS + STATE],
    ),
    "local steps with state": (
        *(None, None, False, {"local_steps": (8, None, "averaged")}),
        [REPORTS, WEIGHTS + STATE],
    ),
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_what_an_epoch_of_eight_steps_exchanges(groups, name):
    *given, wanted = EXCHANGED[name]
    for got in groups(2).call("rank_accumulating:counted", *given):
        for epoch in got:
            # Beside the loss's sum and count.
            assert [own for own in epoch if own != 8] == wanted


def test_a_checkpoint_of_rank_0_within_a_group_has_all_ranks_gradients(
    groups, tmp_path
):
    results = groups(2).call("rank_accumulating:saved", str(tmp_path))
    for undisturbed, restored in results:
        for one, other in zip(undisturbed, restored, strict=True):
            np.testing.assert_allclose(one, other, 2e-6, 2e-6)


@pytest.mark.parametrize(
    ("differs", "says"),
    [
        ("steps", "gradient_accumulation_steps=3 on rank 0, 4 on rank 1"),
        ("progress", "batches accumulated=0 on rank 0, 1 on rank 1"),
    ],
)
def test_ranks_that_would_update_at_other_batches_are_refused(groups, differs, says):
    with pytest.raises(Raised, match=says):
        groups(2).call("rank_accumulating:refused", differs)
