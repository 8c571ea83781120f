"""How often something crosses the network in a worker's step, on real processes."""

import pytest

SPEC = {
    "kind": "towers",
    "aggregate": 2,
    "total": 2,
    "more": 18,  # beside w and b
    "options": {"wait_timeout_s": 40},
}


@pytest.mark.parametrize("pulled, most", [(True, 5), (False, 20 + 4)])
def test_transfers_of_a_step_do_not_grow_with_the_number_of_variables(
    make_cluster, pulled, most
):
    tasks = make_cluster()
    workers = tasks.train({**SPEC, "pulled": pulled, "quadratic": True})
    tasks.step_together([{"factor": 1.0}] * 2)
    for worker in workers:
        worker.say("transfers", {"factor": 1.0})
    for worker in workers:
        transfers = worker.expect("done")
        assert 3 <= len(transfers) <= most, transfers
