"""The faults that prove the tests' worth can be planted."""

from collections import Counter

from structure.planted import ROOT, has_place, read_faults


def test_every_fault_has_its_line():
    gone = [f"{one.file}: {one.name}" for one in read_faults() if not has_place(one)]
    assert gone == [], "give these the lines that took their places"


def test_every_fault_names_tests_that_exist():
    named = [test for one in read_faults() for test in (*one.tests, one.full)]
    for test in named:
        file, *names = test.partition("[")[0].split("::")
        path = ROOT / "packages" / file
        assert path.exists(), test
        assert all(f"def {name}(" in path.read_text() for name in names), test


def test_no_more_than_five_wait_for_the_night():
    assert sum(bool(one.full) for one in read_faults()) <= 5


def test_every_package_has_some():
    rooms = Counter(one.file.partition("/")[0] for one in read_faults())
    assert len(rooms) == 11
    assert all(count >= 2 for count in rooms.values()), rooms
