"""The built site has each page as Markdown, too, and lists them for programs.

`nox -s docs` builds the site and runs this. Otherwise it is skipped, as a site that was
built before need not be that of the pages as they are.
"""

import ast
import importlib
import inspect
import os
import re
import sys
from html import unescape
from pathlib import Path

import pytest
from harness.docs_blocks import PAGES, ROOT, python_blocks

sys.path.insert(0, str(ROOT / "docs"))
from api_names import find_names

SITE = Path(os.environ.get("TOWERS_SITE", "no site")).resolve()
LIST = SITE / "llms.txt"
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)")
ENTRY = re.compile(r"^- \[(?P<title>.+?)\]\((?P<path>\S+?\.md)\)(: (?P<note>.+))?$")

if "TOWERS_SITE" not in os.environ:
    pytest.skip("TOWERS_SITE names no site", allow_module_level=True)

DOCS = ROOT / "docs"
SOURCES = sorted({*PAGES, *DOCS.glob("tutorials/*.ipynb")})
NAMES = [path.relative_to(DOCS).with_suffix("").as_posix() for path in SOURCES]
TWINS = {name: (SITE / f"{name}.md").read_text("utf-8") for name in NAMES}


def prose(text):
    """Markdown without its code."""
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(`+).+?\1", "", text)


def test_every_page_has_a_twin_that_it_names():
    assert len(NAMES) > 40
    for name in NAMES:
        html = (SITE / f"{name}.html").read_text("utf-8")
        twin = name.rpartition("/")[2]
        link = f'<link rel="alternate" type="text/markdown" href="{twin}.md">'
        assert link in html, name
        title = re.search(r"<title>(.*?) - towers</title>", html, re.DOTALL)
        wanted = re.sub(r"<.*?>", "", unescape(title[1])) if title else "towers"
        first = TWINS[name].lstrip().splitlines()[0]
        assert first.replace("`", "").replace("\\", "") == f"# {wanted}", name


def test_no_two_pages_have_one_title():
    titles = [TWINS[name].lstrip().splitlines()[0] for name in NAMES]
    assert sorted(titles) == sorted(set(titles))


def test_every_public_name_is_in_the_reference():
    pages = {path.stem: path.read_text("utf-8") for path in SITE.glob("api/tw-*.html")}
    assert sorted(pages) == sorted(
        p.parent.name for p in ROOT.glob("packages/*/api.txt")
    )
    # Some classes have pages of their own.
    text = "".join(path.read_text("utf-8") for path in SITE.glob("api/tw*.html"))
    described = set(re.findall(r'id="[\w.]+\.(\w+)"', text))
    for package, page in pages.items():
        interface = (ROOT / "packages" / package / "api.txt").read_text("utf-8")
        for module, names in find_names(interface).items():
            for name in sorted(set(names) - {"__getattr__"}):
                found = getattr(importlib.import_module(module), name)
                if inspect.isclass(found) or inspect.isroutine(found):
                    assert found.__name__ in described, (module, name)
                assert f">{name}<" in page, (module, name)


def read_entries():
    """Reads each described name's signatures, and text below up to the next name."""
    entry = re.compile(
        r'<dt class="sig sig-object py" id="(?P<name>[\w.]+)">(?P<signature>.*?</dt>'
        r'(?:\s*<dt class="sig sig-object py">.*?</dt>)*)'  # of overloads
        r'(?P<text>.*?)(?=<dt class="sig sig-object py" id|\Z)',
        re.DOTALL,
    )
    for path in SITE.glob("api/tw*.html"):
        for found in entry.finditer(path.read_text("utf-8")):
            words = [unescape(re.sub("<.*?>", "", part)) for part in found.groups()[1:]]
            yield found["name"], *words


def read_arguments():
    """Reads the names of classes and functions in interfaces, bases and arguments."""
    line = re.compile(r"(?P<kind>class|def) (?P<name>[\w.]+)\((?P<rest>.*)")
    for path in (ROOT / "packages").glob("*/api.txt"):
        for found in filter(None, map(line.match, path.read_text("utf-8").split("\n"))):
            rest, depth, end = found["rest"], 1, 0
            while depth:
                depth += (rest[end] in "([{") - (rest[end] in ")]}")
                end += 1
            taken = ast.parse(f"def f({rest[: end - 1]}): ...").body[0].args
            names = [a.arg for a in taken.posonlyargs + taken.args + taken.kwonlyargs]
            base = re.match(r"->|(?: of (\w+))?", rest[end:])[1]
            yield found["kind"], found["name"], base, {*names} - {"self", "cls"}


def test_every_argument_is_in_a_signature_and_every_constructors_is_described():
    entries = {}
    for name, signature, text in read_entries():  # a method by its class's name, too
        entries[name] = entries[".".join(name.split(".")[-2:])] = (signature, text)
        *_, parent, own = name.split(".")
        level = "method" if parent[0].isupper() else "function"
        for key in (own, f"{level} {own}"):
            entries.setdefault(key, (signature, text))
    lacking = []
    for kind, name, base, arguments in read_arguments():
        *path, own = name.split(".")
        if own.startswith("__"):
            continue
        level = "method" if path[-1][0].isupper() else "function"
        # The last if a base describes it.
        shown = (name, f"{path[-1]}.{own}", f"{level} {own}")
        signature, text = next(entries[key] for key in shown if key in entries)
        inherited = entries.get(base, ("", ""))[1]
        for argument in sorted(arguments):
            word = re.compile(rf"\b{argument}\b")
            if not word.search(signature):
                lacking.append(f"{name}: {argument} is not in {signature}")
            if kind == "class" and not word.search(text + inherited):
                lacking.append(f"{name}: {argument} is not described")
    assert not lacking


def test_types_have_names_and_arguments_are_described_in_place():
    entries = {name: text for name, _, text in read_entries()}
    both = "reducer (Reducer | StatefulReducer | None)"
    assert both in entries["tw_keras.TowerModel"]
    assert "devices (Devices | int | None)" in entries["tw_keras.TowerModel"]
    assert "measured (Measured | None)" in entries["tw_reduce.auto"]
    assert (
        "dense gradients of fewer bytes are packed" in entries["tw_reduce.all_reduce"]
    )
    elsewhere = ("get_variable", "session.run")  # TensorFlow's
    for name, text in entries.items():
        sent = set(re.findall(r"\) . as for ([\w.]+?)\.?\n", text)) - {*elsewhere}
        assert not sent, f"{name}: say what {sent} say"
        assert "Return type:\nAny" not in text, name


def test_a_method_that_hands_its_arguments_to_keras_shows_them():
    signatures = {name: signature for name, signature, _ in read_entries()}
    assert "(x=None, y=None, batch_size=None" in signatures["tw_keras.TowerModel.fit"]
    assert "(" not in signatures["tw_core.OptimizerLike"]  # a protocol is not made


def test_every_page_says_what_it_is_about():
    for name in NAMES:
        if name not in ("glossary",):
            page = (SITE / f"{name}.html").read_text("utf-8")
            assert '<meta name="description" content="' in page, name


def test_a_twin_has_its_pages_code():
    for path in PAGES:
        name = path.relative_to(DOCS).with_suffix("").as_posix()
        for block in python_blocks(path):
            lines = [line.strip() for line in block.code.splitlines()]
            shown = [line.strip() for line in TWINS[name].splitlines()]
            at = shown.index(lines[0])
            assert any(
                shown[at : at + len(lines)] == lines
                for at in range(at, len(shown))
                if shown[at] == lines[0]
            ), f"{path}:{block.line}"


def test_links_and_pictures_of_twins_lead_somewhere():
    links = [
        (name, link)
        for name, text in TWINS.items()
        for link in LINK.findall(prose(text))
    ]
    assert len(links) > 100
    base = {name: (SITE / name).parent for name in NAMES}
    broken = {f"{n}: {link}" for n, link in links if not (base[n] / link).exists()}
    assert not broken


def test_a_twin_has_signatures_as_python_has_them():
    assert "### tw_reduce.mean(reducer, \\*, weights=None)" in TWINS["api/tw-reduce"]
    assert "**devices** (Sequence[str])" in TWINS["api/tw-reduce"]


def test_the_list_of_pages_is_as_its_convention_has_it():
    title, gap, summary, *rest = LIST.read_text("utf-8").splitlines()
    assert (title, gap) == ("# towers", "")
    assert summary.startswith("> Train a Keras model, or your own TensorFlow step")
    sections = [line for line in rest if line.startswith("## ")]
    assert sections[0] == "## Start"
    assert sections[-1] == "## Optional"
    assert len(set(sections)) == len(sections)
    entries = [line for line in rest if line and line not in sections]
    assert all(ENTRY.match(line) for line in entries), entries


def test_the_list_has_every_page_once_with_a_line_on_it():
    entries = [
        found
        for line in LIST.read_text("utf-8").splitlines()
        if (found := ENTRY.match(line))
    ]
    listed = [entry["path"].removesuffix(".md") for entry in entries]
    assert sorted(listed) == sorted(NAMES)
    without = [entry["title"] for entry in entries if not entry["note"]]
    assert without == ["Glossary"]
