"""Optimizers of TensorFlow 1 and tapes, against one process with the whole batch."""

import horovod_models
import horovod_ranks
import numpy as np
import pytest
from horovod_models import make_batch
from horovod_ranks import train

SUM, MAX = 1, 4
KINDS = {False: "RefVariable", True: "ResourceVariable"}


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request, processes):
    """Ranks that only call ``disable_v2_behavior``, as older programs do."""
    group = horovod_ranks.make(processes, request.param, v1=True)
    yield group
    group.end()


@pytest.fixture(scope="module", params=[1, 2])
def eager_ranks(request, processes):
    group = horovod_ranks.make(processes, request.param)
    yield group
    group.end()


@pytest.mark.parametrize("use_resource", KINDS)
def test_a_session_trains_as_one_process_would(ranks, use_resource):
    rows, targets, results = train(ranks, "train_in_session", use_resource=use_resource)
    for got in results:
        assert got["is_optimizer"] and got["none"] and got["steps"] == 4
        assert got["kind"] == KINDS[use_resource]
        assert got["slots"] == ["momentum"]
        assert got["variables"] == [got["slot"]] == ["w/Momentum:0"]
        want = horovod_models.train(rows, targets, start=1.0)
        np.testing.assert_allclose(got["weights"], want, rtol=1e-5)


@pytest.mark.parametrize("use_resource", KINDS)
@pytest.mark.parametrize("averages", [False, True])
def test_several_passes_make_a_step(ranks, use_resource, averages):
    options = {
        "backward_passes_per_step": 2,
        "average_aggregated_gradients": averages,
    }
    rows, targets, results = train(
        ranks,
        "train_in_session",
        steps=6,
        use_resource=use_resource,
        options=options,
    )
    factor = 1.0 if averages else 2.0
    want = horovod_models.train(rows, targets, steps=3, start=1.0, factor=factor)
    for got in results:
        assert got["steps"] == 6
        np.testing.assert_allclose(got["weights"][1::2], want, rtol=1e-5)
        np.testing.assert_array_equal(got["weights"][2::2], got["weights"][1:-1:2])


@pytest.mark.parametrize(
    ("options", "factor", "rtol"),
    [
        ({"op": SUM}, None, 1e-5),
        ({"gradient_predivide_factor": 3.0}, 1.0, 1e-5),
        ({"compression": "fp16"}, 1.0, 1e-2),
        ({"compression": "bf16"}, 1.0, 5e-2),
        ({"compression": "own"}, 0.5, 1e-5),
        ({"groups": 2, "device_dense": "/cpu:0"}, 1.0, 1e-5),
    ],
)
def test_options_do_what_they_say(ranks, options, factor, rtol):
    rows, targets, results = train(ranks, "train_in_session", options=options)
    factor = len(rows) if factor is None else factor
    if options.get("compression") == "own" and len(rows) == 1:
        factor = 1.0  # Alone, nothing travels.
    want = horovod_models.train(rows, targets, start=1.0, factor=factor)
    for got in results:
        np.testing.assert_allclose(got["weights"], want, rtol=rtol)


def test_collectives_work_in_a_program_of_tensorflow_1(ranks):
    size = len(ranks.all)
    rows = np.arange(6, dtype=np.float32).reshape(6, 1)
    splits = {"splits": [6 - size + 1] + [1] * (size - 1)}
    wanted = {
        "allreduce": ({"op": SUM}, lambda rank: size * rows),
        "allgather": ({}, lambda rank: np.concatenate([rows] * size)),
        "broadcast": ({"root_rank": 0}, lambda rank: rows),
        "reducescatter": ({}, lambda rank: np.array_split(rows, size)[rank]),
    }
    for name, (options, want) in wanted.items():
        for rank, got in enumerate(ranks.call("call", name, "session", rows, options)):
            np.testing.assert_array_equal(got, want(rank))
        above = np.ones([len(want(0)), 1], np.float32)
        calls = [
            (name, "session", rows, above[: len(want(rank))], options)
            for rank in range(size)
        ]
        for got in ranks.call_each("gradient", calls):
            assert got.shape == rows.shape
    for rank, (got, counts) in enumerate(
        ranks.call("call", "alltoall", "session", rows, splits)
    ):
        np.testing.assert_array_equal(counts, [splits["splits"][rank]] * size)
        assert len(got) == sum(counts)
    for _, _, gathered in ranks.call("pass_around", "x", 0):
        assert gathered == ["x"] * size
    for rank, got in enumerate(ranks.call("place")):
        assert got == [*[rank, size] * 3, 0, 1, True]


@pytest.mark.parametrize("passes", [1, 2])
def test_the_gradient_of_a_local_variable_is_this_ranks(ranks, passes):
    size = len(ranks.all)
    options = {"backward_passes_per_step": passes}
    rows, targets, results = train(
        ranks, "train_in_session", steps=4, is_local=True, options=options
    )
    for rank, got in enumerate(results):
        own = slice(rank, rank + 1)
        want = horovod_models.train(
            rows[own],
            targets[own],
            steps=4 // passes,
            start=1.0,
            factor=passes / size,
        )
        np.testing.assert_allclose(
            got["weights"][passes - 1 :: passes], want, rtol=1e-5
        )


@pytest.mark.parametrize("use_resource", KINDS)
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients_are_reduced(ranks, use_resource, sparse_as_dense):
    size = len(ranks.all)
    options = {"sparse_as_dense": sparse_as_dense}
    want = np.zeros([6, 2])
    for rank in range(size):
        want[[rank, rank + 1]] += 0.5 / size
    calls = [([rank, rank + 1], use_resource, options) for rank in range(size)]
    for got in ranks.call_each("train_rows_in_session", calls):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_tape_trains_as_one_process_would(eager_ranks, is_eager):
    rows, targets, results = train(eager_ranks, "train_with_tape", is_eager=is_eager)
    # All take their first gradient where they start, and go on from rank 0's.
    first = np.mean(
        [
            horovod_models.gradient(np.full([2], 1.0 + rank), *own)
            for rank, own in enumerate(zip(rows, targets, strict=True))
        ],
        axis=0,
    )
    for got in results:
        assert got["none"]
        np.testing.assert_allclose(got["weights"][0], 1.0 - 0.1 * first, rtol=1e-5)
        np.testing.assert_array_equal(got["weights"], results[0]["weights"])


def test_a_rank_that_joins_brings_zeros_to_means_over_all(eager_ranks):
    size = len(eager_ranks.all)
    rows, targets = make_batch(size)
    batches = [2 + rank % 2 + (rank == 0) for rank in range(size)]
    calls = [
        ("train_with_tape", rows[rank], targets[rank], {"batches": batches[rank]})
        for rank in range(size)
    ]
    want = horovod_models.train(rows, targets, steps=max(batches), batches=batches)
    last = np.flatnonzero(np.array(batches) == max(batches))[-1]
    for rank, got in enumerate(eager_ranks.call_each("call_program", calls)):
        own = want[: batches[rank]]
        np.testing.assert_allclose(got["weights"][:-1], own, rtol=1e-5)
        assert got["last"] == last


@pytest.mark.parametrize(
    ("op", "options"),
    [
        (SUM, {}),
        (SUM, {"sparse_as_dense": True}),
        (MAX, {"sparse_as_dense": True, "scale_local_gradients": False}),
    ],
)
def test_local_sources_stay_with_their_rank(eager_ranks, op, options):
    size = len(eager_ranks.all)
    share = size if options.get("scale_local_gradients", True) else 1
    want = np.zeros([4, 2])
    for rank in range(size):
        want[rank] += (1.0 + rank) ** 2
    for rank, got in enumerate(eager_ranks.call("take_gradients", op, options)):
        np.testing.assert_allclose(got["dense"], want)
        assert got["sparse"] == (not options)
        scale = 2 * (1.0 + rank) * 2 / share
        np.testing.assert_allclose(got["scale"], scale, rtol=1e-6)
        assert got["one"] == got["scale"]
        assert got["local"] == got["shared"] == [True]
        assert got["watched"] == 2


@pytest.mark.slow
def test_gradients_in_float64_meet_no_narrower_number(eager_ranks):
    size = len(eager_ranks.all)
    total = sum(1 / (3.0 + rank) for rank in range(size))
    scaled = 0.3 * sum(0.1 * (0.1 + rank) for rank in range(size))
    want = [total / size, total / size, total, scaled]
    for got, casts in eager_ranks.call("reduce_in_float64"):
        assert casts == []
        np.testing.assert_allclose(got, want, rtol=1e-15)
