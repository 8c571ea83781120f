"""The pages of errors have every message that says what to do, and its cause."""

import re

import pytest
from docs_blocks import ROOT
from error_messages import Message, find_classes, find_messages

PAGES = {
    path.stem: path.read_text("utf-8")
    for path in sorted((ROOT / "docs" / "errors").glob("*.md"))
}
MESSAGES = find_messages(ROOT)
PACKAGES = sorted({message.package for message in MESSAGES})
CLASSES = find_classes(ROOT)
ENTRY = re.compile(
    r"^### `(?P<title>.+)`\n\n"
    r"\*\*(?P<kind>.+):\*\* `+ ?(?P<text>.+?) ?`+\n\n"
    r"(?P<cause>(?:.+\n)+)",
    re.MULTILINE,
)


def page_of(package):
    return PAGES[package.removeprefix("tw-")]


def entries(package):
    return list(ENTRY.finditer(page_of(package)))


def as_entry(message):
    """What to write into the page, but for the cause."""
    title = re.split(r"; |\. ", message.line.split(": ", 1)[-1])[0]
    kind = message.kind or "CLASS"
    shown = f"`` {message.line} ``" if "`" in message.line else f"`{message.line}`"
    return f"{message.place}\n### `{title}`\n\n**{kind}:** {shown}\n\nCAUSE\n"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_message_that_says_what_to_do_is_explained(package):
    explained = {entry["text"] for entry in entries(package)}
    wanted = [m for m in MESSAGES if m.package == package and m.has_remedy]
    assert len(wanted) > 20
    missing = [as_entry(m) for m in wanted if m.line not in explained]
    page = f"docs/errors/{package.removeprefix('tw-')}.md"
    assert not missing, f"{page} lacks, below one of its `##`:\n\n" + "\n".join(missing)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_explains_no_message_that_is_gone(package):
    found = {m.line: m.kind for m in MESSAGES if m.package == package}
    listed = entries(package)
    assert len(listed) == page_of(package).count("\n### ")
    gone = [entry["text"] for entry in listed if entry["text"] not in found]
    assert not gone, f"docs/errors: no longer in the source of {package}: {gone}"
    for entry in listed:
        kind = found[entry["text"]]
        if kind.endswith(("Error", "Warning")):
            assert entry["kind"] == kind, entry["text"]


@pytest.mark.parametrize("package", PACKAGES)
def test_titles_are_words_of_their_messages_and_each_leads_somewhere_else(package):
    listed = entries(package)
    titles = [entry["title"] for entry in listed]
    assert len(set(titles)) == len(titles), sorted(titles)
    for entry in listed:
        words = re.findall(r"\w{3,}", entry["title"])
        assert words, entry["text"]
        strange = [word for word in words if word not in entry["text"]]
        assert len(strange) < len(words) / 2, entry["title"]
        assert len(entry["cause"].split()) >= 4, entry["title"]


def test_every_public_class_of_errors_is_explained():
    """What it means, what raises it, what to do."""
    sections = dict(
        re.findall(r"^## `(\w+)`\n(.*?)(?=^## )", PAGES["index"], re.M | re.S)
    )
    assert sections.keys() == CLASSES.keys()
    for name, home in CLASSES.items():
        assert f"`{home}.{name}`" in sections[name]
        for part in ("Means", "Raised by", "What to do"):
            assert f"- **{part}:** " in sections[name], name


def test_sentences_that_the_first_page_quotes_are_of_the_source():
    table = PAGES["index"].partition("## When processes")[2]
    quoted = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(quoted) == 10
    texts = "\n".join(message.line for message in MESSAGES)
    assert [text for text in quoted if text not in texts] == []


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("ValueError", "f: n must be 1; got …. Pass 1.", True),
        ("ValueError", "f: n is 0; use 1.", True),
        ("RuntimeError", "f: no gradient; got …. Does the loss depend on them?", True),
        ("RuntimeError", "f: must be called outside of a tf.function.", True),
        ("ValueError", "f: n must be at least 1; got ….", False),
        ("ValueError", "f: unknown mode …; known are ….", False),
        ("", "tower … at … (…)", False),
        ("", "… is shared; make a new one", True),
    ],
)
def test_a_message_says_what_to_do_or_only_what_is_wrong(kind, text, says):
    assert Message("tw-x", kind, text, "x.py:1").has_remedy == says


def test_messages_are_found_wherever_they_are_written(tmp_path):
    folder = tmp_path / "packages" / "tw-x" / "src" / "tw_x"
    folder.mkdir(parents=True)
    (folder / "_work.py").write_text(
        '"""Of no use: use another."""\n'
        "def work(n):\n"
        '    """Works on it; use it."""\n'
        "    if n:\n"
        '        raise ValueError(f"work: n is {n}; "\n'
        '            f"use {n + 1}.")\n'
        '    _log.warning("work: took %.1f s; use %d threads.", n, n)\n'
        '    warnings.warn("work: is deprecated; use play." + n, stacklevel=2)\n'
        '    return "a part of it; use that"\n'
    )
    found = find_messages(tmp_path)
    assert [(m.kind, m.text) for m in found] == [
        ("ValueError", "work: n is …; use …."),
        ("logged", "work: took … s; use … threads."),
        ("warned", "work: is deprecated; use play.…"),
        ("", "a part of it; use that"),
    ]
    assert all(m.has_remedy for m in found)
    assert found[0].place == "packages/tw-x/src/tw_x/_work.py:5"
