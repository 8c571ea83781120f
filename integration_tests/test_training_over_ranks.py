"""Programs of Keras's users train over processes and towers as on one device."""

import csv
import os
import re
from importlib.util import find_spec

import keras
import numpy as np
import pytest
from harness.ranks import Raised
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import (
    keras_gallery,
    rank_batches,
    rank_calls,
    rank_memory_fits,
    rank_training,
)

pytestmark = pytest.mark.slow

OVER_MPI = (
    *("Adam", "sparse gradients", "two optimizers", "accumulated"),
    *("sparse gradients in shards", "two optimizers in shards"),
    "accumulated in shards",
)
SHAPES = {"2 x 1": (2, 1), "2 x 2": (2, 2), "3 x 1": (3, 1)}  # ranks, towers


def assert_alike(results, want, rtol=2e-6):
    for got in results:
        for one, other in zip(got, want, strict=True):
            if isinstance(one, dict):
                assert _unnumbered(one) == _unnumbered(other)
                one, other = list(one.values()), list(other.values())
            for a, b in zip(one, other, strict=True):
                np.testing.assert_allclose(a, b, rtol, rtol / 2)
    for got in results[1:]:
        np.testing.assert_equal(got[0], results[0][0])
        np.testing.assert_equal(got[1], results[0][1])


def _unnumbered(history):
    """Keras numbers metrics of one kind in each process."""
    return [re.sub(r"_\d+$", "", name) for name in history]


@pytest.mark.parametrize("name", rank_training.CASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_program_gives_what_it_gives_on_one_device(groups, shape, name, tmp_path):
    size, towers = SHAPES[shape]
    folders = [tmp_path / str(n) for n in range(size + 1)]
    for folder in folders:
        folder.mkdir()
    arguments = [(name, towers, str(folder)) for folder in folders]
    results = groups(size).call_each("rank_training:train", arguments[:-1])
    own = rank_training.CASES[name].get("is_close", 2e-6)
    assert_alike(results, rank_training.train(None, name, 1, str(folders[-1])), own)


@pytest.mark.skipif(not find_spec("mpi4py"), reason="mpi4py is not installed")
@pytest.mark.parametrize(
    ("size", "function", "name"),
    [
        *((size, "train", name) for size in (2, 3) for name in OVER_MPI),
        *((2, "on_own", name) for name in rank_batches.OWN),
    ],
)
def test_a_fit_over_mpi_is_that_of_one_device(groups, size, function, name):
    module = {"train": rank_training, "on_own": rank_batches}[function]
    towers = 2 if size == 2 else 1
    results = groups(size, "mpi").call(f"{module.__name__}:{function}", name, towers)
    assert_alike(results, getattr(module, function)(None, name, 1), 2e-5)


@pytest.mark.parametrize("name", keras_gallery.DETERMINISTIC)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_program_of_the_gallery_has_the_losses_of_one_device(groups, shape, name):
    size, towers = SHAPES[shape]
    own = keras_gallery.DETERMINISTIC[name]
    first, *others = groups(size).call("rank_training:gallery", name, towers, own)
    want = keras_gallery.train(name, None, "float64", **own)
    assert keras_gallery.difference(first, want) < 1e-6
    for other in others:
        assert keras_gallery.difference(other, first) == 0


def test_callbacks_of_keras_write_on_rank_0_alone(groups, tmp_path):
    folders = [tmp_path / str(n) for n in range(2)]
    for folder in folders:
        folder.mkdir()
    arguments = [("files", 2, str(folder)) for folder in folders]
    first, _ = groups(2).call_each("rank_training:train", arguments)
    assert not list(folders[1].iterdir())
    best = keras.models.load_model(folders[0] / "best.keras")
    np.testing.assert_equal(best.get_weights(), first[1])
    assert {path.name for path in folders[0].glob("*.h5")}
    best.load_weights(next(folders[0].glob("*.weights.h5")))
    with (folders[0] / "log.csv").open() as lines:
        losses = [float(line["loss"]) for line in csv.DictReader(lines)]
    np.testing.assert_allclose(losses, first[0]["loss"])
    assert any((folders[0] / "board").rglob("events.*"))


def test_shared_arrays_are_shuffled_alike_and_saved_for_all(groups, tmp_path):
    first, second = groups(2).call("rank_calls:shuffled", str(tmp_path))
    np.testing.assert_equal(second[:2], first[:2])
    assert (first[2:], second[2:]) == (([0, 1], True), ([], True))


@pytest.mark.parametrize(
    ("variables", "towers"), [("replicated", 1), ("parameter_server", 2)]
)
def test_rank_0_may_load_the_model_that_others_build(
    groups, tmp_path, variables, towers
):
    rank_training.seeded(rank_training.dense, 3)().save(tmp_path / "model.keras")
    arguments = str(tmp_path), variables, towers
    results = groups(2).call("rank_calls:resumed", *arguments)
    assert_alike(results, rank_calls.resumed(None, *arguments))


def test_ranks_exchange_accumulated_gradients_once_per_update(groups):
    # Of eight batches, in groups of three.
    for looks, count in [(False, 2), (True, 8)]:
        want = rank_calls.exchanged(None, looks)
        for rank, got in enumerate(groups(2).call("rank_calls:exchanged", looks)):
            assert got[0] == count
            # A callback of one rank sees what one device has between batches.
            pairs = [(got[1], want[1]), *zip(got[2], want[2], strict=False)]
            assert len(pairs) == (9 if looks and rank == 1 else 1)
            for own, plain in pairs:
                for a, b in zip(own, plain, strict=True):
                    np.testing.assert_allclose(a, b, 2e-6, 2e-7)


@pytest.mark.parametrize(
    ("name", "size", "towers", "steps"),
    [
        *[("top k", 2, 1, 0), ("top k", 2, 2, 0), ("power_sgd", 2, 2, 2)],
        *[("whole first", 2, 2, 0), ("whole first", 2, 1, 2), ("by variable", 2, 1, 0)],
        ("in parts", 3, 2, 0),
    ],
)
def test_ranks_remember_what_they_did_not_send(
    groups, name, size, towers, steps, tmp_path
):
    arguments = [(name, towers, steps, str(tmp_path / str(n))) for n in range(size)]
    first, *others = groups(size).call_each("rank_memory_fits:fits", arguments)
    whole, _ = first
    for own in (*whole[1:], *(w for other, _ in others for w in other)):
        np.testing.assert_equal(own, whole[0])
    if not steps:  # Otherwise NumPy has no order of sums to follow.
        # Adam makes more of the last digits of whole gradients near zero.
        near = 2e-6 if name in ("top k", "in parts") else 1e-5
        assert_alike([[whole[0]]], [rank_memory_fits.on_one_device(name)], near)
        for trained, again in (first, *others):
            np.testing.assert_equal(again, trained)


def test_all_ranks_begin_anew_where_a_backup_has_no_memory(groups, tmp_path):
    first, second = groups(2).call("rank_memory_fits:without_companion", str(tmp_path))
    np.testing.assert_equal(first, second)  # with PowerSGD's factors, errors of zero
    assert first and any(not own.any() for own in first.values())


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_stop_where_one_asks(groups, rank):
    # Asked after the second batch of four, heard with the third.
    for place, wanted in (("on_train_batch_end", (1, 3)), ("on_epoch_end", (2, 8))):
        assert groups(2).call("rank_calls:stop", place, rank) == [wanted] * 2


@pytest.mark.slow(by_day=["no batch, eagerly-1", "no batch at first-1"])
@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("name", rank_batches.OWN)
def test_batches_of_ones_own_give_what_they_give_joined(groups, name, towers):
    results = groups(2).call("rank_batches:on_own", name, towers)
    own = rank_batches.OWN[name].get("is_close", 2e-6)
    assert_alike(results, rank_batches.on_own(None, name, 1), own)


ROWS = st.lists(st.integers(0, 3), max_size=4)


def has_rows(of_ranks):
    steps = range(max(map(len, of_ranks)))
    return steps and all(sum(sum(own[n : n + 1]) for own in of_ranks) for n in steps)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
@pytest.mark.timeout(900)
@settings(max_examples=10 if os.environ.get("TOWERS_TESTS") == "full" else 4)
@given(data=st.data())
def test_any_numbers_of_batches_and_rows(groups, kind, is_known, data):
    size, towers = data.draw(st.sampled_from([(1, 2), (2, 1), (2, 2), (3, 1), (3, 2)]))
    rows = data.draw(st.lists(ROWS, min_size=size, max_size=size).filter(has_rows))
    call = ("rank_batches:on_any", rows, towers, is_known, kind)
    results = groups(size).call(*call)
    assert_alike(results, rank_batches.on_any(None, rows, 1, is_known))


def test_a_fit_exchanges_three_times_and_an_epoch_once():
    group = rank_calls.Counting()
    model = rank_training.made(group, rank_training.dense, 2)
    model.compile(rank_training.sgd(), "mse", metrics=["mae"])
    for epochs in (1, 3):
        group.seen.clear()
        model.fit(rank_training.X, rank_training.Y, 4, epochs, verbose=0)
        begins = ["settings of fit", "numbers of rank 0", "variables"]
        assert group.seen == begins + ["loss/total"] * epochs


def test_a_number_that_is_none_stops_all_after_the_same_batch(groups):
    assert groups(2).call("rank_calls:not_a_number") == [3, 3]


def test_batches_by_hand_and_predictions_of_one_rank(groups, tmp_path):
    results = groups(2).call("rank_calls:by_hand", str(tmp_path))
    assert_alike(results, rank_calls.by_hand(None, str(tmp_path)))


def test_a_file_of_rank_0_alone_is_not_that_of_all(groups, tmp_path):
    for read, trained in groups(2).call("rank_calls:saved_again", str(tmp_path)):
        np.testing.assert_equal(read, trained)


def test_moving_averages_are_those_of_rank_0(groups):
    first, second = groups(2).call("rank_calls:statistics")
    assert first == second
    np.testing.assert_allclose(first[0], first[1], rtol=1e-6)


@pytest.mark.parametrize("mode", ["replicated", "sharded", "parameter_server"])
def test_what_a_first_batch_makes_is_equal_on_all_ranks(groups, mode):
    first, second = groups(2).call("rank_calls:first_batches", mode)
    (seen, ends), (others, other_ends) = first, second
    assert [len(seen), len(others)] == [2, 6]
    assert [others[0], others[3]] == seen  # later ones are rank 1's alone
    assert ends == other_ends
    assert ends[0][0] == others[2]
    # Rank 0's first part is what counts; one update has followed.
    rows = rank_calls.X[:2]
    assert np.abs(np.array(seen[0]) + rows.mean(axis=0)).max() < 0.5


def test_ranks_and_towers_draw_unlike_numbers_which_a_seed_repeats(groups):
    drawn = groups(2).call("rank_calls:noise", 1)
    for n in range(2):  # layers
        assert len({own[n] for of_rank in drawn for own in of_rank}) == 2 * 2 * 2
    assert groups(2).call("rank_calls:noise", 1) == drawn
    assert groups(2).call("rank_calls:noise", 2) != drawn


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("stop, none", r"every rank needs a batch.*got \[0, 1\] by rank"),
        ("stop, a part", r"steps_per_execution=2; got \[3, 4\] by rank"),
        ("shared", "the data of some ranks has ended"),
        ("other rows", "all ranks must get the same batches"),
        ("weights", "by a sum over all ranks, which is not known when they"),
        ("synchronised, eagerly", "over ranks, which needs run_eagerly=False"),
        ("synchronised, rows", r"so their shapes must be known; got \(None, 4\)"),
    ],
)
def test_what_ranks_cannot_do_is_refused(groups, kind, says):
    with pytest.raises(Raised, match=says):
        groups(2).call("rank_calls:refused", kind)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("data", "data='own' on {0}, 'shared' on {1}"),
        ("uneven", "uneven='wait' on {0}, 'stop' on {1}"),
        ("steps_per_execution", "steps_per_execution=1 on {0}, 2 on {1}"),
        (
            "gradient_accumulation_steps",
            "gradient_accumulation_steps=1 on {0}, 2 on {1}",
        ),
        ("epochs", "epochs=3 on {0}, 2 on {1}"),
        ("validation_data", "validation data=no on {0}, yes on {1}"),
        ("validation_split", "validation data=yes on {0}, no on {1}"),
    ],
)
def test_settings_that_differ_are_refused_on_all_ranks(groups, size, name, says):
    says = says.format("rank 0", {2: "rank 1", 3: "ranks 1 and 2"}[size])
    for rank in groups(size).all:
        rank.say("rank_calls:unlike", name)
    for rank in groups(size).all:
        with pytest.raises(Raised, match=f"same settings on all ranks; got {says}"):
            rank.hear()
