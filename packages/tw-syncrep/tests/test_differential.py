"""On real processes, the numbers are those of TensorFlow's class, step by step."""

import numpy as np
import pytest

CASES = {
    "dense": {},
    "momentum and averages": {"inner": "momentum", "averages": True, "quadratic": True},
    "adam": {"inner": "adam", "quadratic": True},
    "sparse": {"sparse": True, "inner": "adam"},
    "sparse and averages": {"sparse": True, "averages": True},
}
STEPS = 4


def values_of(step: int, replica: int) -> dict:
    ids = {0: [0, 2, 4], 1: [2, 3, 5], 2: [1, 2, 5]}[replica]
    return {"factor": float((step + 1) * (replica + 2)), "ids": ids}


def trace(make_cluster, spec, *, rounds):
    """Runs rounds and returns what the chief reads after each of them.

    A round lists the replicas whose gradients count, and who comes too late.
    """
    tasks = make_cluster(workers=spec["total"])
    tasks.train(spec)
    seen = []
    for step, (timely, late) in enumerate(rounds):
        values = [values_of(step, replica) for replica in range(spec["total"])]
        tasks.step_together(values, timely)
        tasks.step_together(values, late)
        seen.append(tasks.workers[0].ask("read"))
    tasks.kill()
    return seen


# The others are below, where rounds that leave a replica out have these, too.
@pytest.mark.slow(by_day=["sparse"])
@pytest.mark.parametrize("case", ["momentum and averages", "adam", "sparse"])
def test_two_replicas_have_tensorflows_numbers(make_cluster, case):
    spec = {"aggregate": 2, "total": 2, **CASES[case]}
    rounds = [([0, 1], [])] * STEPS
    compare(make_cluster, spec, rounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["dense", "momentum and averages", "sparse and averages"]
)
def test_three_replicas_with_a_backup_have_tensorflows_numbers(make_cluster, case):
    spec = {"aggregate": 2, "total": 3, **CASES[case]}
    rounds = [([0, 1], [2]), ([1, 2], [0]), ([0, 2], [1]), ([0, 1], [2])]
    compare(make_cluster, spec, rounds)


def compare(make_cluster, spec, rounds):
    want = trace(make_cluster, {**spec, "kind": "tensorflow"}, rounds=rounds)
    options = {"sparse_mean": "per_row", "wait_timeout_s": 50}
    mine = {**spec, "kind": "towers", "options": options}
    got = trace(make_cluster, mine, rounds=rounds)
    assert [step for step, _ in want] == list(range(1, len(rounds) + 1))
    averaged = [name for name in want[0][1] if "ExponentialMovingAverage" in name]
    assert bool(averaged) == spec.get("averages", False)
    for (step, ours), (their_step, theirs) in zip(got, want, strict=True):
        assert step == their_step
        assert ours.keys() == theirs.keys()
        for name in theirs:
            if "/Adam" in name and spec.get("sparse"):
                continue  # theirs are decayed for the next round while it is waited for
            message = f"{name} at step {step}"
            np.testing.assert_allclose(ours[name], theirs[name], 1e-6, 1e-6, message)
