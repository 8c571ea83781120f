"""Keras 3 under Horovod's names, against one process with the whole batch."""

import horovod_models
import horovod_ranks
import keras
import numpy as np
import pytest
from harness.ranks import Raised
from horovod_ranks import train

SUM = 1
KERAS = tuple(map(int, keras.__version__.split(".")[:2]))


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request, processes):
    group = horovod_ranks.make(processes, request.param)
    yield group
    group.end()


@pytest.mark.parametrize(
    "compiling", [{}, {"jit_compile": True}, {"run_eagerly": True}]
)
def test_fit_trains_as_one_process_would(ranks, compiling, tmp_path):
    rows, targets, results = train(
        ranks, "fit", compiling=compiling, folder=str(tmp_path)
    )
    want = horovod_models.train(rows, targets, start=1.0)
    starts = [np.full([2], 1.0), *want[:-1]]
    losses = [np.mean((rows @ weights - targets) ** 2) for weights in starts]
    for got in results:
        np.testing.assert_allclose(got["weights"], want, rtol=1e-4)
        np.testing.assert_allclose(got["losses"], losses, rtol=1e-4)
        assert got["class"] == "SGD" and got["is_keras"] and got["variables"]
        assert got["iterations"] == 4
        for key, (name, is_ours, steps, velocity, weights) in got["loaded"].items():
            assert (name, is_ours, steps) == ("SGD", key == "ours", 4)
            np.testing.assert_array_equal(velocity, got["velocity"])
            np.testing.assert_array_equal(weights, got["weights"][-1])


def test_ranks_train_the_roots_restored_weights_with_noise_of_their_own(
    ranks, tmp_path
):
    results, again = (ranks.call("restore", str(tmp_path / run)) for run in "ab")
    for got, other in zip(results, again, strict=True):
        np.testing.assert_array_equal(got["weights"], results[0]["weights"])
        np.testing.assert_array_equal(got["dropped"], other["dropped"])
    np.testing.assert_array_equal(results[0]["weights"][0], np.ones([32]))
    assert len({got["dropped"].tobytes() for got in results}) == len(results)


@pytest.mark.parametrize(
    ("is_built", "layer"), [(True, "dense"), (False, "dense"), (False, "other")]
)
def test_ranks_go_on_from_a_model_that_rank_0_alone_loads(
    ranks, tmp_path, is_built, layer
):
    given = {"folder": str(tmp_path), "is_built": is_built, "layer": layer}
    rows, targets, results = train(ranks, "resume", **given)
    want = horovod_models.train(rows, targets, start=1.0, steps=6)
    for got in results:
        np.testing.assert_allclose(got["weights"], want, rtol=1e-4)
        assert got["iterations"] == 6
    if KERAS < (3, 16):  # It gave the layers of a loaded Sequential other paths.
        assert results[0]["path"] == "dense/kernel"
        assert all(got["path"] != "dense/kernel" for got in results[1:])


def test_copies_of_an_optimizer_reduce(ranks):
    size = len(ranks.all)
    mean = -(1.0 + size) / 2
    for rank, got in enumerate(ranks.call("apply_copies")):
        own = -1.0 - rank
        assert got["applied"] == {
            "from_config": (mean, mean),
            "made": (mean, mean),
            "copy": (mean, own),
            "deepcopy": (mean, own),
        }
        [none, *of_clone] = got["said"]
        assert not none and [len(texts) for texts in of_clone] == [size > 1]


def test_fit_ends_where_weights_part(processes):
    group = horovod_ranks.make(processes, 2)
    try:
        with pytest.raises(Raised, match=r"check_same: 1 of 1 .*'.*kernel'.*rank 1"):
            train(group, "fit", parts_at=2)
    finally:
        group.end()


def test_local_variables_stay_with_their_rank_in_fit(ranks):
    rows, targets, results = train(ranks, "fit", is_local=True)
    for rank, got in enumerate(results):
        own = slice(rank, rank + 1)
        want = horovod_models.train(
            rows[own], targets[own], start=1.0 + rank, factor=1.0 / len(rows)
        )
        np.testing.assert_allclose(got["weights"], want, rtol=1e-4)


def test_local_layers_stay_with_their_rank(ranks):
    own = 1.0 + np.arange(len(ranks.all))
    for rank, got in enumerate(ranks.call("train_partial")):
        grads, updates = [own.mean(), own[rank]], [own.mean(), own[rank] / len(own)]
        assert got == pytest.approx([*grads, *(1 - update for update in updates)])


@pytest.mark.parametrize("averages", [False, True])
def test_several_passes_make_a_step_of_fit(ranks, averages):
    options = {
        "backward_passes_per_step": 2,
        "average_aggregated_gradients": averages,
        "name": "own",
    }
    rows, targets, results = train(ranks, "fit", steps=6, options=options)
    factor = 1.0 if averages else 2.0
    want = horovod_models.train(rows, targets, steps=3, start=1.0, factor=factor)
    for got in results:
        assert got["iterations"] == 6 and got["name"] == "own"
        np.testing.assert_allclose(got["weights"][1::2], want, rtol=1e-4)
        np.testing.assert_array_equal(got["weights"][2::2], got["weights"][1:-1:2])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"is_eager": True},
        {"is_scaled": True},
        {"options": {"op": SUM, "gradient_predivide_factor": 1.0}},
        {"options": {"backward_passes_per_step": 1, "groups": 2}},
        {"options": {"backward_passes_per_step": 2}, "is_eager": True},
    ],
)
def test_a_loop_of_ones_own_trains_so_too(ranks, given):
    rows, targets, results = train(ranks, "train_by_hand", **given)
    options = given.get("options", {})
    passes = options.get("backward_passes_per_step", 1)
    factor = len(rows) if options.get("op") == SUM else float(passes)
    want = horovod_models.train(
        rows, targets, steps=4 // passes, start=1.0, factor=factor
    )
    for got in results:
        np.testing.assert_allclose(got["weights"][passes - 1 :: passes], want, 1e-4)
        assert got["iterations"] == 4


def test_the_learning_rate_warms_up(ranks):
    size, epochs, batches = len(ranks.all), 2, 3
    done = (np.arange(epochs * batches) + 1) / (epochs * batches)
    want = 0.8 * (1 + done * (size - 1)) / size
    for got in ranks.call("warm_up", epochs, batches, 0.9):
        np.testing.assert_allclose(got[: len(want)], want, rtol=1e-6)
        np.testing.assert_allclose(got[len(want) :], 0.8, rtol=1e-6)


def test_a_velocity_is_corrected_where_the_rate_changes(ranks):
    # The gradient is 1: v = momentum * (new / old) * v - rate.
    rate, velocity, weight, want = 0.5, 0.0, 0.0, []
    for epoch in range(3):
        new = 0.5 * 0.5**epoch
        velocity = 0.5 * velocity * new / rate - new
        weight, rate = weight + velocity, new
        want.append(weight)
    for got in ranks.call("schedule", 0.5):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_batches_are_normalized_together(ranks):
    size = len(ranks.all)
    draw = np.random.default_rng(3)
    own = draw.normal(3.0, 2.0, (size, 4, 2)).astype(np.float32)
    whole = own.reshape(-1, 2).astype(np.float64)
    mean, variance = whole.mean(axis=0), whole.var(axis=0)
    normal = (whole - mean) / np.sqrt(variance)
    # d/dx of sum(n (x + s)), s of the rank: n + (g - mean(g) - n mean(g n)) / std.
    shifts = np.repeat(np.arange(size, dtype=np.float64), 4)[:, None]
    above = whole + shifts
    inner = above - above.mean(axis=0) - normal * (above * normal).mean(axis=0)
    wanted = np.split(normal + inner / np.sqrt(variance), size)
    calls = [(own[rank], float(rank)) for rank in range(size)]
    results = ranks.call_each("normalize", calls)
    for rank, got in enumerate(results):
        np.testing.assert_allclose(got["mean"], mean, rtol=1e-5)
        np.testing.assert_allclose(got["variance"], variance, rtol=1e-4)
        want = np.split(normal, size)[rank]
        np.testing.assert_allclose(got["normal"], want, atol=1e-4)
        np.testing.assert_allclose(got["later"], want, atol=1e-4)
        np.testing.assert_allclose(got["gradient"], wanted[rank], atol=1e-3)
        assert got["name"].startswith("sync_batch_normalization")


def test_values_are_exchanged(ranks):
    size = len(ranks.all)
    for got in ranks.call("call_keras", "allreduce", [1.0, 2.0]):
        np.testing.assert_array_equal(got, [1.0, 2.0])
    for got in ranks.call("call_keras", "allgather", [1.0]):
        np.testing.assert_array_equal(got, [1.0] * size)
    for got in ranks.call("call_keras", "broadcast", 3, size - 1):
        assert got == 3
    rows = np.arange(size)
    for rank, got in enumerate(ranks.call("call_keras", "reducescatter", rows)):
        assert got == [rank]
