"""The benchmark of calls times the chief's round with all tickets that it needs."""

from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_round_is_timed_with_all_tickets_that_it_needs(monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parent / "lab" / "benchmarks")
    from calls import time_rounds

    few, many = time_rounds([2, 6], [2], times=1)
    assert (few["tickets"], many["tickets"]) == (2, 6)
    assert 0 < few["least_s"] <= few["median_s"]
    # Each ticket is selected on the table's server and added on the other.
    assert many["ops"] - few["ops"] > 4 * 100
    assert many["reads"] == few["reads"]
    assert capsys.readouterr().out.count(" ms") == 4
