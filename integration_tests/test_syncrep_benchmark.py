"""The benchmark of synchronous replicas checks steps that have come to pass."""

from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from cluster_threads import start_servers

BENCHMARKS = Path(__file__).parent / "benchmarks"


@pytest.fixture
def replicas(monkeypatch):
    """TensorFlow's two replicas, as the benchmark builds them."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from syncrep_worker import Trained
    from syncrep_works import PEER, Work

    local = start_servers()
    ports = {
        job: [int(address.rpartition(":")[2]) for address in listed]
        for job, listed in local.addresses.items()
    }
    work = Work("one variable", 1, 4, (PEER,), ())
    return [
        Trained(local.target("worker", index), ports, index, work, PEER)
        for index in range(2)
    ]


@pytest.mark.timeout(120)
def test_a_block_ends_though_one_replica_took_the_tokens_of_both(replicas):
    ahead, behind = replicas
    push(behind)
    with ThreadPoolExecutor(1) as pool:
        # It ends the first step, takes both tokens of it, and is done with its second
        # run before there is a second step.
        block = pool.submit(ahead.run, 2)
        wait([block], timeout=3)
        if block.done():
            block.result()
        take_token(behind)
        behind.run(1)
        block.result(60)
    assert ahead.reached() == behind.reached() == 2
    for steps in (1, 3):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda replica, n=steps: replica.run(n), replicas))
    assert ahead.reached() == 6


@pytest.mark.timeout(120)
def test_a_round_is_timed_with_all_tickets_that_it_needs(monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from calls import time_rounds

    few, many = time_rounds([2, 6], [2], times=1)
    assert (few["tickets"], many["tickets"]) == (2, 6)
    assert 0 < few["least_s"] <= few["median_s"]
    # Each ticket is selected on the table's server and added on the other.
    assert many["ops"] - few["ops"] > 4 * 100
    assert many["reads"] == few["reads"]
    assert capsys.readouterr().out.count(" ms") == 4


def push(replica):
    """Runs a step of a replica up to where it takes its token."""
    operations = replica.session.graph.get_operations()
    replica.session.run([o for o in operations if o.type.endswith("ApplyGradient")])


def take_token(replica):
    """Runs the rest of the step."""
    replica.session.run(replica.tokens.take)
    replica.expected += 1
