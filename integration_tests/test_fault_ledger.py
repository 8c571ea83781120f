"""The ledger of the fault drills: taken up where it ended, and told as a table."""

from lab.faults.ledger import GOOD, Ledger, Line, choose, summarize

LINE = Line("a worker killed", GOOD, 0.25, 3.25, 0, "abc", "")


def test_a_ledger_that_was_cut_off_in_a_line_is_taken_up(tmp_path):
    path = tmp_path / "ledger.tsv"
    ledger = Ledger(path)
    ledger.add(LINE)
    failed = Line("b", "two\twords\nof it", None, None, 3, "abc", "")
    ledger.add(failed)
    path.write_text(path.read_text()[:-4])
    again = Ledger(path)
    assert again.lines == [LINE]
    again.add(failed)
    (_, told) = Ledger(path).lines
    assert (told.verdict, told.beyond_s, told.lost) == ("two words of it", None, 3)
    assert choose(["b", LINE.drill], [LINE], [], each=None, total=2) == "b"


def test_the_table_tells_of_failures_and_lost_steps():
    slow = Line("a worker killed", "too late", 2.0, 5.0, 4, "abc", "")
    calm = Line("b", GOOD, None, 1.0, 0, "abc", "")
    scene = Line("scene", GOOD, None, None, 0, "abc", "")
    grid = {("worker", "killed"): {"in time": "b", "retried": "a worker killed"}}
    table = summarize([LINE, slow, calm, scene], grid).splitlines()
    assert table[2] == (
        "| worker | killed | 1 of 1; 1.00 / 1.00 s | 1 of 2; +1.12 / +2.00 s | 4 |"
    )
    assert table[3] == "| scene |  | 1 of 1 |  | 0 |"
    assert summarize([scene], {}, tells_lost=False).splitlines()[::2] == [
        "| victim | fault | trials |",
        "| scene |  | 1 of 1 |",
    ]
