"""The faults that prove the tests' worth can be planted."""

from collections import Counter

from structure.planted import ROOT, has_place, read_faults


def test_every_fault_has_its_line():
    gone = [f"{one.file}: {one.name}" for one in read_faults() if not has_place(one)]
    assert gone == [], "give these the lines that took their places"


def test_every_fault_names_tests_that_exist():
    tests = [test for one in read_faults() for test in one.tests]
    assert [test for test in tests if not (ROOT / "packages" / test).exists()] == []


def test_every_package_has_some():
    rooms = Counter(one.file.partition("/")[0] for one in read_faults())
    assert len(rooms) == 11
    assert all(count >= 2 for count in rooms.values()), rooms
