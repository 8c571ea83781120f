"""The page of messages has each that has a cause, and causes still fit messages."""

import re
import sys

import pytest
from harness.docs_blocks import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import error_pages
from error_pages import find_causes, find_explained, find_messages, render

PACKAGES = sorted(ROOT.glob("packages/tw-*"))
INDEX = (ROOT / "docs" / "errors" / "index.md").read_text("utf-8")
ENTRY = re.compile(
    r"^## `+ ?(?P<title>.+?) ?`+\n\n\*\*[\w ]+\*\* of (?P<package>tw-\w+)"
    r"(?:, `+ ?(?P<refuses>.+?) ?`+)?(?:: `+ ?(?P<advice>.+?) ?`+)?\n\n(?P<cause>.+)",
    re.MULTILINE,
)


def public_errors():
    """The public classes of errors and warnings -> where they are public."""
    interfaces = "\n".join(path.read_text() for path in ROOT.glob("packages/*/api.txt"))
    named = r"^class ([\w.]+)\.(\w+(?:Error|Warning|Exception))\b"
    return {name: home for home, name in re.findall(named, interfaces, re.MULTILINE)}


@pytest.mark.slow
def test_each_entry_has_the_words_of_its_message_and_a_cause():
    listed = list(ENTRY.finditer(render()))
    explained = find_explained()
    assert len(listed) > 50
    assert [entry["title"] for entry in listed] == list(explained)
    for entry in listed:
        message, cause = explained[entry["title"]]
        assert entry["package"] == message.package
        assert entry["cause"] == cause.splitlines()[0]
        parts = [entry[part] or "" for part in ("refuses", "title", "advice")]
        words = re.findall(r"\w+", " ".join(parts))
        assert words == re.findall(r"\w+", message.text)


def test_entries_are_in_the_order_of_their_first_words():
    """Not of names and numbers, for which there is a hole."""
    titles = [entry["title"] for entry in ENTRY.finditer(render())]
    words = [re.sub(r"^\W+", "", title).casefold() for title in titles]
    assert [w.split()[0] for w in words] == sorted(w.split()[0] for w in words)


@pytest.mark.slow(by_day=True)
def test_causes_follow_their_messages():
    messages = [m for package in PACKAGES for m in find_messages(package)]
    _, lost = find_causes(messages)
    assert lost == [], "give these the words of their messages"
    assert len(find_explained()) == len(find_causes(messages)[0])


def test_every_public_class_of_errors_is_explained():
    """What it means, what raises it, what to do."""
    sections = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## )", INDEX, re.M | re.S))
    classes = public_errors()
    assert sections.keys() == classes.keys()
    for name, home in classes.items():
        assert f"`{home}.{name}`" in sections[name]
        for part in ("Means", "Raised by", "What to do"):
            assert f"- **{part}:** " in sections[name], name


def test_sentences_that_the_first_page_quotes_are_of_the_source(monkeypatch):
    table = INDEX.partition("## When processes")[2]
    quoted = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(quoted) == 14
    monkeypatch.setattr(error_pages.Message, "is_shown", True)  # parts of messages, too
    messages = find_messages(ROOT / "packages" / "tw-ranks")
    texts = "\n".join(message.text for message in messages)
    assert [text for text in quoted if text not in texts] == []


SOURCE = '''"""Of no use: use another."""
def work(n):
    """Works on it; use it."""
    if n:
        raise ValueError(f"work: n is {n}; "
            f"use {n + 1}.")
    _log.warning("work: took %.1f s; use %d threads.", n, n)
    warnings.warn("work: is deprecated; use play." + n, stacklevel=2)
    label = "a string without a remedy"
    return "a part of it; use that"
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "packages" / "tw-x" / "src" / "tw_x"
    folder.mkdir(parents=True)
    (folder / "_work.py").write_text(SOURCE)
    monkeypatch.setattr(error_pages, "CAUSES", tmp_path / "causes.toml")
    return tmp_path / "packages" / "tw-x"


def test_messages_are_found_wherever_they_are_written(package):
    assert [(m.kind, m.text) for m in find_messages(package)] == [
        ("ValueError", "work: n is …; use …."),
        ("logged", "work: took … s; use … threads."),
        ("warned", "work: is deprecated; use play.…"),
        ("", "a part of it; use that"),
    ]


def test_a_cause_stays_with_a_reworded_message(package, monkeypatch):
    error_pages.CAUSES.write_text('"took many s; use threads" = "It was slow."\n')
    found = find_causes(find_messages(package))
    assert found == ({"work: took … s; use … threads.": "It was slow."}, [])
    monkeypatch.setattr(error_pages, "ROOT", package.parents[1])
    assert "**Logged** of tw-x, `work`: `use … threads.`\n\nIt was slow.\n" in render()


@pytest.mark.parametrize("words", ["nothing has these", "is deprecated; use player"])
def test_a_cause_without_a_message_of_its_own_is_left_out(package, words):
    causes = f'"is deprecated; use play" = "Old."\n"{words}" = "Other."\n'
    error_pages.CAUSES.write_text(causes)
    found, lost = find_causes(find_messages(package))
    assert (list(found.values()), lost) == (["Old."], [words])
