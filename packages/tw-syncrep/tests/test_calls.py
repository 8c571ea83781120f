"""How many gRPC calls a step has, counted on the wire."""

import os

import pytest


@pytest.fixture(scope="module")
def counted(processes):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from syncrep_counted import CountedCluster

    counted = CountedCluster(processes, ps=2, workers=4)
    yield counted
    counted.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "workers, servers, is_pulled, variables",
    [(2, 1, True, 3), (4, 2, True, 2), (2, 2, False, 3), (4, 1, False, 2)],
)
def test_a_step_has_the_calls_of_the_formula(
    counted, workers, servers, is_pulled, variables
):
    from syncrep_counted import CountedRun, Work, expected_at_table, expected_calls

    work = Work(workers, servers, variables, is_pulled)
    run = CountedRun(counted, work)
    calls = run.calls_of_a_step(6)
    run.close()
    by_method = {}
    for (_, _, method), count in calls.items():
        by_method[method] = by_method.get(method, 0) + count
    assert by_method == expected_calls(work)
    at_table = [count for key, count in calls.items() if run.table_server in key]
    assert sum(at_table) == expected_at_table(work)
