"""Bytes that ranks send in ``fit``, beside those of ``describe(ranks=R)``."""

import json
import re
import sys

import pytest
from harness.launching import run_forked
from programs import rank_bytes

DEADLINE_S = 300


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 30)
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_sends_what_its_reducer_describes(size):
    launch = [sys.executable, "-m", "tw_launch", "--isolate", "--ps", "0"]
    program = ["--workers", str(size), "--", sys.executable, rank_bytes.__file__]
    status, out = run_forked([*launch, *program], deadline_s=DEADLINE_S)
    if "does not allow a network namespace" in out:
        pytest.skip("no network namespaces here")
    assert status == 0, out
    rows = map(json.loads, re.findall(r"FOUND (.*)", out))
    found = {name: (counted, numbers) for name, counted, numbers in rows}
    assert list(found) == list(rank_bytes.REDUCERS)
    none, _ = found.pop("none")
    for name, (counted, (sent, *_, of_gradients)) in found.items():
        assert counted == pytest.approx(sent, rel=0.05), name
        assert none == pytest.approx(of_gradients, rel=0.05), name
