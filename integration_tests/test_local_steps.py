"""Ranks that train alone for some steps, and average: the numbers of one device."""

import numpy as np
import pytest
from harness.ranks import Raised
from programs import rank_local

pytestmark = pytest.mark.slow

ROWS = {
    2: [[4, 6, 1, 3, 5], [3, 2, 2, 4]],
    3: [[4, 2, 1, 3, 5], [], [2, 2, 2]],
}


@pytest.mark.parametrize("kind", ["", "heavy", "nesterov"])
@pytest.mark.parametrize("state", ["local", "averaged"])
@pytest.mark.parametrize("optimizer", rank_local.OPTIMIZERS)
@pytest.mark.parametrize("size", ROWS)
def test_ranks_train_as_models_that_are_averaged(groups, size, optimizer, state, kind):
    how, rows = (optimizer, state, kind), ROWS[size]
    towers = 2 if size == 2 else 1
    is_known = state == "local"
    call = ("rank_local:train", rows, 2, how, towers, is_known)
    results = groups(size).call(*call)
    want = rank_local.simulate(results[0][-1], rows, 2, how)
    for got in results:
        check(got, want)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_stop_at_the_averaging_after_one_asks(groups, rank):
    call = ("rank_local:stopped", rank)
    one, other = groups(2).call(*call)
    assert one[0] == other[0] == 4
    np.testing.assert_equal(one[1], other[1])


def test_a_restart_ends_with_the_bits_of_an_undisturbed_run(groups, tmp_path):
    call = ("rank_local:restarted", str(tmp_path / "backup"))
    for found, plain, loss, wanted in groups(2).call(*call):
        (weights, state), again = found
        np.testing.assert_equal(again, [weights, state])
        assert any(np.any(own) for own in state[-2:])  # the outer momentum
        np.testing.assert_equal(plain, weights)
        assert loss == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("towers", [1, 2])
def test_an_outer_optimizer_follows_layers_that_are_unfrozen(groups, towers, tmp_path):
    for found, wanted in groups(2).call("rank_local:unfrozen", str(tmp_path), towers):
        for got, want in zip(found, wanted, strict=True):
            for own, value in zip(got, want, strict=True):
                np.testing.assert_allclose(own, value, atol=1e-5)


def test_batches_by_hand_are_averaged_too(groups):
    one, other = groups(2).call("rank_local:by_hand")
    are_equal = [
        all(np.array_equal(a, b) for a, b in zip(own, its, strict=True))
        for own, its in zip(one, other, strict=True)
    ]
    assert are_equal == [False, True, False, True]


def test_steps_of_ones_own_are_averaged(groups):
    call = ("rank_local:averaged", [5, 2, 0])
    found = groups(3).call(*call)
    # Ranks 0 and 1 of the weights 1 and 2 are at 2 and 4, then rank 0 is alone.
    first, second, last = 10 / 3, 10 / 3 + 2, 10 / 3 + 3
    wanted = [[(1, first), (3, second)], [(1, first)], []]
    for rank, (seen, ends, slot, count, seeds) in enumerate(found):
        np.testing.assert_allclose(seen, wanted[rank])
        np.testing.assert_allclose([*ends, slot], [last, last, 6.0])
        assert count == 5
        assert seeds == [10 * rank, 10 * rank + 1]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("no group", "local_steps=4 needs a group of ranks"),
        ("calls", "multiple of steps_per_execution; got 4 and 3"),
        ("saves", r"BackupAndRestore\(save_freq=3\) would save rank 0's weights"),
        ("unlike", "local_steps=4 on rank 0, 2 on rank 1"),
    ],
)
def test_what_local_steps_refuse(make_ranks, what, says):
    with pytest.raises(Raised, match=says):
        make_ranks(2 if what == "unlike" else 1).joined().call(
            "rank_local:refused", what
        )


def check(got, want):
    seen, state, towers, losses, _ = got
    after, wanted_state, wanted_losses = want
    same(seen, after)
    for tower in towers:
        same(tower, after[-1])
    same(losses, wanted_losses)
    same(state, wanted_state)


def same(got, want):
    if isinstance(want, list):
        for a, b in zip(got, want, strict=True):
            same(a, b)
    else:
        np.testing.assert_allclose(got, want, 1e-5, 5e-6)
