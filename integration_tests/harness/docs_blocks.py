"""The code blocks of the READMEs and of the pages under docs/."""

import contextlib
import importlib
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
READMES = (ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md")))
PAGES = tuple(
    path
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if "examples" not in path.relative_to(ROOT / "docs").parts
)

_FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,}|:{3,})(?P<info>[^\n]*)\n"
    r"(?P<code>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
_FILE = re.compile(r"\A# (\w+\.py)\n")
_LAUNCH = re.compile(r"^ *tw-launch (.*?) ?-- python (\w+\.py)$", re.MULTILINE)


@contextlib.contextmanager
def example(name: str) -> Iterator[Any]:
    """Imports a program of the examples, beside which others are found meanwhile."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    info: str  # what stands behind the fence, e.g. ``python``.
    code: str  # without the fences, dedented
    line: int  # where the code starts in the page, from 1

    @property
    def options(self) -> list[str]:
        """The lines of a directive's options, such as ``:class: before``."""
        return [line for line in self.code.splitlines() if line.startswith(":")]

    @property
    def is_before(self) -> bool:
        """Whether it shows an older system's program, which is not run."""
        return self.info.startswith("{code-block}") and ":class: before" in self.options

    @property
    def file_name(self) -> str | None:
        """The file that the block is, where its first line says so."""
        named = _FILE.match(self.code)
        return named[1] if named else None


@dataclass(frozen=True)
class Launch:
    """A command line of the page that starts a file of the page in a cluster."""

    options: tuple[str, ...]
    file_name: str

    @property
    def command(self) -> list[str]:
        """The same with this interpreter, for the folder that holds the file."""
        launcher = [sys.executable, "-m", "tw_launch", *self.options]
        return [*launcher, "--", sys.executable, self.file_name]


def blocks(path: Path) -> list[Block]:
    """Lists the fenced blocks of a page, in order."""
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            match["info"].strip(),
            textwrap.dedent(match["code"]),
            text.count("\n", 0, match.start("code")) + 1,
        )
        for match in _FENCE.finditer(text)
    ]


def python_blocks(path: Path) -> list[Block]:
    """Lists the blocks that a page has to run."""
    return [block for block in blocks(path) if block.info == "python"]


def launches(path: Path) -> list[Launch]:
    """Lists what a page starts with ``tw-launch``."""
    found = _LAUNCH.findall(path.read_text(encoding="utf-8"))
    return [Launch(tuple(shlex.split(options)), name) for options, name in found]


def files(path: Path) -> dict[str, str]:
    """Lists the programs of a page by file name.

    A block is a program when its first line is a comment with a file's name. In
    a page that launches one file and names none, the only block is that file.
    """
    own = python_blocks(path)
    named = {block.file_name: block.code for block in own if block.file_name}
    wanted = {launch.file_name for launch in launches(path)}
    if wanted and not named and len(own) == 1:
        return {wanted.pop(): own[0].code}
    return {name: code for name, code in named.items() if name}


def name(path: Path) -> str:
    """The page's path, below the repository."""
    return path.relative_to(ROOT).as_posix()
