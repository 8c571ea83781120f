"""One hang of each kind: who is stopped is named, and where.

``nox -s faults -- --drill hangs`` makes them again and again, at random places.
"""

import pytest
from lab.faults import hangs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", hangs.DRILLS)
def test_the_report_of_a_hang_names_who_was_stopped_and_where(processes, name):
    outcome = hangs.run_drill(processes, name, seed=1)
    assert outcome.failure == ""
    assert outcome.beyond_s <= hangs.GRACE_S


def test_a_report_that_names_another_is_no_good_one():
    report = "  waits for step 3\n  missing   tower1: hangs\n"

    def hang(missing, what="step 3", after_s=2.5):
        found = hangs.Hang("here", missing, what)
        found.told.append(hangs.Told(report, after_s))
        return found.fault()

    assert hang(["tower1: hangs"]) == ""
    assert "named ['tower1: hangs']" in hang(["tower2: hangs"])
    assert "named ['tower1: hangs']" in hang(["tower1: hangs", "tower2: hangs"])
    assert "named ['tower1: hangs']" in hang([])
    assert "named 'step 3'" in hang(["tower1: hangs"], what="step 4")
    assert "too late" in hang(["tower1: hangs"], after_s=3.1)
    assert "nobody raised" in hangs.Hang("here", [], "").fault()
