"""Gradients are sent while others are computed."""

import pytest
from programs.rank_overlap import BUCKET_BYTES


@pytest.mark.slow(
    by_day=["step-effects", "fit-", "fit, uneven-", "fit, shards-effects"]
)
@pytest.mark.parametrize("effects", [False, True], ids=["", "effects"])
@pytest.mark.parametrize(
    "kind", ["step", "step, shards", "fit", "fit, multi", "fit, uneven", "fit, shards"]
)
def test_a_backward_pass_meets_an_exchange_of_its_own_step(groups, kind, effects):
    ranks = groups(2, bucket_bytes=BUCKET_BYTES)
    for met in ranks.call("rank_overlap:has_met", kind, effects):
        assert met
        assert all(met)


@pytest.mark.slow(by_day=True)
def test_ranks_in_different_exchanges_of_a_step_are_in_no_mismatch(groups):
    """They begin in the order in which gradients are computed, on each rank."""
    late_s = 3.0  # The rule waits for 1 s.
    same = groups(2).call("rank_overlap:sums_in_any_order", late_s)
    assert same == [[2, 2]] * 2
