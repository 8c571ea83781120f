"""Gradients are sent while others are computed."""

import pytest
from programs.rank_overlap import BUCKET_BYTES


@pytest.mark.parametrize("effects", [False, True], ids=["", "effects"])
@pytest.mark.parametrize(
    "kind", ["step", "step, shards", "fit", "fit, multi", "fit, uneven", "fit, shards"]
)
def test_a_backward_pass_meets_an_exchange_of_its_own_step(groups, kind, effects):
    ranks = groups(2, bucket_bytes=BUCKET_BYTES)
    for met in ranks.call("rank_overlap:has_met", kind, effects):
        assert met
        assert all(met)
