"""How often something crosses the network in a worker's step, on real processes."""

import pytest

SPEC = {
    "kind": "towers",
    "aggregate": 2,
    "total": 2,
    "quadratic": True,
    "options": {"wait_timeout_s": 40},
}


def transfers_of_a_step(make_cluster, **changes):
    """Names what each worker's step receives from other tasks or sends to them."""
    tasks = make_cluster()
    workers = tasks.train({**SPEC, **changes})
    tasks.step_together([{"factor": 1.0}] * 2)
    for worker in workers:
        worker.say("transfers", {"factor": 1.0})
    return [worker.expect("done") for worker in workers]


@pytest.mark.parametrize("variables", [2, 20])
@pytest.mark.parametrize("pulled", [True, False])
def test_transfers_of_a_step(make_cluster, pulled, variables):
    more = variables - 2  # besides w and b
    found = transfers_of_a_step(make_cluster, pulled=pulled, more=more)
    for transfers in found:
        # Of w, b and the others, only what the loss reads is pulled.
        assert 3 <= len(transfers) <= (5 if pulled else variables + 4), transfers


def test_tensorflows_step_needs_three_transfers_a_variable(make_cluster):
    found = transfers_of_a_step(make_cluster, kind="tensorflow", more=18)
    assert max(map(len, found)) >= 3 * 20
