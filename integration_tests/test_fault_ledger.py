"""The ledger of the fault drills: taken up where it ended, and told as a table."""

from faults.ledger import GOOD, Ledger, Line, choose, summarize

LINE = Line("a worker killed", GOOD, 0.25, 3.25, 0, "abc", "")
GRID = {("worker", "killed"): {"in time": "b", "retried": "a worker killed"}}


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
    assert not told.is_good


def test_drills_take_turns_until_there_are_enough():
    names, lines, chosen = ["a", "b", "c"], [], []
    while (name := choose(names, lines, [], each=None, total=7)) is not None:
        chosen.append(name)
        lines.append(Line(name, GOOD, None, None, 0, "", ""))
    assert "".join(chosen) == "abcabca"
    assert choose(names, lines, ["b"], each=3, total=None) == "c"
    assert choose(names, lines, ["b", "c"], each=3, total=8) is None


def test_the_table_tells_of_failures_and_lost_steps():
    slow = Line("a worker killed", "too late", 2.0, 5.0, 4, "abc", "")
    calm = Line("b", GOOD, None, 1.0, 0, "abc", "")
    scene = Line("scene", GOOD, None, None, 0, "abc", "")
    table = summarize([LINE, slow, calm, scene], GRID).splitlines()
    assert table[2] == (
        "| worker | killed | 1 of 1; 1.00 / 1.00 s | 1 of 2; +1.12 / +2.00 s | 4 |"
    )
    assert table[3] == "| scene |  | 1 of 1 |  | 0 |"
    assert summarize([scene], {}).splitlines()[::2] == [
        "| victim | fault | trials | steps lost |",
        "| scene |  | 1 of 1 | 0 |",
    ]


def test_the_table_need_not_tell_of_lost_steps():
    table = summarize([LINE], {("worker", "killed"): {"session": LINE.drill}})
    assert table.splitlines()[0] == "| victim | fault | session | steps lost |"
    told = summarize(
        [LINE], {("worker", "killed"): {"session": LINE.drill}}, tells_lost=False
    )
    assert told.splitlines() == [
        "| victim | fault | session |",
        "| --- | --- | --- |",
        "| worker | killed | 1 of 1; +0.25 / +0.25 s |",
    ]


def test_who_raises_before_the_deadline_has_a_minus():
    early = Line("scene", GOOD, -0.25, None, 0, "abc", "")
    assert "1 of 1; -0.25 / -0.25 s" in summarize([early], {})
