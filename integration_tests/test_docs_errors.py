"""The pages of errors have every message as a heading, and causes that still fit."""

import re
import sys

import pytest
from docs_blocks import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import error_pages
from error_pages import find_causes, find_messages, render, titled

PACKAGES = sorted(ROOT.glob("packages/tw-*"))
INDEX = (ROOT / "docs" / "errors" / "index.md").read_text("utf-8")
ENTRY = re.compile(
    r"^### `+ ?(?P<title>.+?) ?`+\n\n\*\*[\w ]+\*\*"
    r"(?: of `+ ?(?P<refuses>.+?) ?`+)?(?:: `+ ?(?P<advice>.+?) ?`+)?$",
    re.MULTILINE,
)

each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)


def public_errors():
    """The public classes of errors and warnings -> where they are public."""
    interfaces = "\n".join(path.read_text() for path in ROOT.glob("packages/*/api.txt"))
    named = r"^class ([\w.]+)\.(\w+(?:Error|Warning|Exception))\b"
    return {name: home for home, name in re.findall(named, interfaces, re.MULTILINE)}


@each_package
def test_every_message_has_a_heading_of_its_own_words(package):
    page = package.name.removeprefix("tw-")
    assert (ROOT / "docs" / "errors" / f"{page}.md").is_file()
    assert f"({page}.md)" in INDEX
    listed = list(ENTRY.finditer(render(package)))
    assert len(listed) > 5
    titles = [entry["title"] for entry in listed]
    assert len(set(titles)) == len(titles), sorted(titles)
    messages = titled(find_messages(package))
    assert sorted(titles) == sorted(title for title, _ in messages)
    texts = {title: message.text for title, message in messages}
    for entry in listed:
        parts = [entry[part] or "" for part in ("refuses", "title", "advice")]
        text = texts[entry["title"]]
        assert re.findall(r"\w+", " ".join(parts)) == re.findall(r"\w+", text)


def test_causes_follow_their_messages():
    """Tolerates a few that wait for new words after a message was rewritten."""
    pages = "".join(map(render, PACKAGES))
    messages = [m for package in PACKAGES for m in find_messages(package)]
    found, lost = find_causes(messages)
    assert lost == [], "give these the words of their messages"
    for title, message in (
        pair for own in PACKAGES for pair in titled(find_messages(own))
    ):
        if message.text in found:
            rest = rf"\n\n\*\*.+\n\n{re.escape(found[message.text])}\n"
            assert re.search(rf"### `+ ?{re.escape(title)} ?`+{rest}", pages)


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


def test_a_cause_stays_with_a_reworded_message(package):
    error_pages.CAUSES.write_text('"took many s; use threads" = "It was slow."\n')
    found = find_causes(find_messages(package))
    assert found == ({"work: took … s; use … threads.": "It was slow."}, [])
    assert "use … threads.`\n\nIt was slow.\n" in render(package)


@pytest.mark.parametrize("words", ["nothing has these", "is deprecated; use player"])
def test_a_cause_without_a_message_of_its_own_is_left_out(package, words):
    causes = f'"is deprecated; use play" = "Old."\n"{words}" = "Other."\n'
    error_pages.CAUSES.write_text(causes)
    found, lost = find_causes(find_messages(package))
    assert (list(found.values()), lost) == (["Old."], [words])
