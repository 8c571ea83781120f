"""The page of renamed names has every one that a package answers to."""

import re
import textwrap
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from docs_blocks import ROOT, blocks
from interfaces.manifest import read_manifests

from tw_core.renames import takes_caller

PAGE = ROOT / "docs" / "migration" / "from_0_1.md"
MODULES = [manifest.module for manifest in read_manifests(ROOT).values()]
MARK = re.compile(r"^ *@.*(renamed_argument|takes_caller)|= renamed_attribute\(")


@pytest.fixture
def page(monkeypatch):
    """The module that makes the page's tables."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    return import_module("renames")


@pytest.fixture
def renames(page):
    return page.renames


def test_the_page_has_a_table_per_package():
    made = [(b.info, b.code) for b in blocks(PAGE) if "renames" in b.info]
    assert sorted(made) == [(f"{{renames}} {module}", "") for module in sorted(MODULES)]


@pytest.mark.parametrize("module", MODULES)
def test_everything_that_a_package_renamed_is_listed(renames, module):
    listed = renames(module)
    folder = Path(find_spec(module).origin).parent
    tables = import_module(f"{module}._renamed") if has_table(folder) else object()
    for old, new in getattr(tables, "NAMES", {}).items():
        assert (f"{module}.{old}", new) in listed
    marks = [
        line
        for path in folder.rglob("*.py")
        for line in path.read_text().splitlines()
        if MARK.search(line)
    ]
    inner = [old for old, _ in listed if not old.startswith(f"{module}.")]
    assert len(inner) >= len(marks)


def has_table(folder):
    return (folder / "_renamed.py").exists()


def test_names_arguments_and_attributes_are_found(renames, tmp_path, monkeypatch):
    sources = {
        "__init__": "",
        "_renamed": """
            NAMES = {"spread": "toy.broadcast"}
            INNER_NAMES = {"a": "toy.inner.b"}
            LOADING = {"stacks": "num_buffers"}
            PACKING = {"below": ("below_bytes", int)}
            """,
        "_work": """
            class Batch:
                tail = renamed_attribute("remainder")

                @renamed_arguments(**_renamed.LOADING, tail="remainder")
                def __init__(self): ...

                @renamed_arguments(timeout="timeout_s")
                def wait(self): ...

            @renamed_arguments(**_renamed.PACKING, s=("seconds", float))
            @takes_caller
            def packed(): ...
            """,
    }
    (tmp_path / "toy").mkdir()
    for name, text in sources.items():
        (tmp_path / "toy" / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    assert renames("toy") == [
        ("toy.spread", "toy.broadcast"),
        ("toy.inner.a", "toy.inner.b"),
        ("Batch.tail", "Batch.remainder"),
        ("Batch(stacks=...)", "Batch(num_buffers=...)"),
        ("Batch(tail=...)", "Batch(remainder=...)"),
        ("Batch.wait(timeout=...)", "Batch.wait(timeout_s=...)"),
        ("packed(below=...)", "packed(below_bytes=...)"),
        ("packed(s=...)", "packed(seconds=...)"),
        ("packed(caller=...)", "with tw_core.checks.naming(...)"),
    ]
    assert renames("json") == []


def test_the_page_says_of_caller_what_the_warning_says(page):
    @takes_caller
    def check(): ...

    with pytest.warns(DeprecationWarning, match=re.escape(page.CALLER["caller"])):
        check(caller="mine")
