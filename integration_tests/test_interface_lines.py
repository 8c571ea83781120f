"""The interface file has a line for everything that a user can write, and no other.

The packages' own files are examples of most kinds; here stands what they have not.
"""

import textwrap

import pytest
from interfaces.api_lines import interface_lines, load


@pytest.fixture
def lines_of(tmp_path):
    """Reads the lines of a package whose module ``_work`` holds the given source."""

    def read(source, *names, **modules):
        folder = tmp_path / "toy"
        folder.mkdir(exist_ok=True)
        stub = "".join(f"from toy._work import {name} as {name}\n" for name in names)
        (folder / "__init__.pyi").write_text(stub)
        for module, text in {"__init__": "", "_work": source, **modules}.items():
            (folder / f"{module}.py").write_text(textwrap.dedent(text))
        return interface_lines(load("toy", tmp_path))

    return read


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("(a, b=1, /, c='x', *d, e, **f)", "(a, b=1, /, c='x', *d, e, **f)"),
        (
            "(\n *,\n b: 'str | None' = None,\n) -> 'A'",
            "(*, b: str | None = None) -> A",
        ),
        ("(a=LIMIT, b=dumps, c=lost)", "(a=16, b=dumps, c=lost)"),
    ],
)
def test_a_name_is_written_with_its_signature(lines_of, source, line):
    before = "from json import dumps\nfrom .lost import lost\nLIMIT = 16\n"
    lines = lines_of(f"{before}def work{source}: ...", "work")
    assert lines == ["module toy", f"def toy.work{line}"]


def test_a_class_shows_members_and_what_it_inherits_but_nothing_private(lines_of):
    source = """
    class _Base:
        def inherited(self, a: int) -> None: ...
        def _hidden(self) -> None: ...

    class _Own(Generic[T]):
        def __get__(self, thing: Any, kind: Any = None) -> T: ...

    class Thing(_Base):
        kept = _Own[list[int]]()
        kind: str = "x"

        def __init__(self, size: int) -> None:
            self.size: int = size
            self._secret = 1

        @property
        def level(self) -> int: ...

        @level.setter
        def level(self, value: int) -> None: ...

        @staticmethod
        def make() -> "Thing": ...
        def __len__(self) -> int: ...
    """
    assert lines_of(source, "Thing") == [
        "module toy",
        "class toy.Thing(size: int) of _Base",
        "def toy.Thing.__len__(self) -> int",
        "def toy.Thing.inherited(self, a: int) -> None",
        "property toy.Thing.kept -> list[int]",
        "value toy.Thing.kind: str = 'x'",
        "property toy.Thing.level -> int @setter",
        "def toy.Thing.make() -> Thing @staticmethod",
        "value toy.Thing.size: int",
    ]


def test_public_modules_count_and_private_names_in_them_do_not(lines_of, tmp_path):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "part.pyi").write_text("from toy._work import work as work\n")
    main = "import os\n\ndef main(): pass\n\ndef _parse(): pass\n"
    other = '__all__ = ["b", "load"]\nfrom json import load\ndef a(): ...\ndef b(): ...'
    modules = {"main": main, "other": other, "part": "", "_private": main}
    assert lines_of("def work(): pass", "work", **modules) == [
        "module toy",
        "module toy.main",
        "def toy.main.main()",
        "module toy.other",
        "def toy.other.b()",
        "alias toy.other.load = json.load",
        "module toy.part",
        "def toy.part.work()",
        "def toy.work()",
    ]


def test_an_exported_name_that_nothing_defines_is_an_error(lines_of):
    source = '__all__ = ["lost", "gone"]'
    with pytest.raises(ValueError, match=r"toy.other exports \['gone', 'lost'\]"):
        lines_of("def work(): pass", "work", other=source)
