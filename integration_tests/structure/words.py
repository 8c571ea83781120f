"""Wordings that a native reader stumbles over, which ``nox -s lint`` refuses.

Read are the pages and READMEs, without their code, and the packages' docstrings,
comments and messages. A place where a wording is right is listed in pyproject.toml.
"""

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

TICS = {
    r"(?-i:(?:(?<=[.:;!] )|^(?!\A)(?:[-*] |\*\*)?)(?:What|Who)\b)"
    r"(?:[^.?!:|\n]|\n(?!\n))*\.(?!\w)": (
        'a noun as the subject: "A rank that is late is named."'
    ),
    r"\bwhom?ever\b": '"any rank that", "every caller that"',
    r"\bone's own\b": '"your own", "its own"',
    r"\balike\b": '"equal", "equally", "in the same way"',
    r"\bbesides\b": '"also", "apart from"',
    r"\bmany an?\b": '"many" and a plural',
    r"(?<!there )\b(?:is|are|was|were) no (?!longer|later|older|more|less|one\b)\w+": (
        '"is not a"'
    ),
    r"\b(?:has|have|had) (?:not )?come\b(?! from)": '"has arrived", "has joined"',
    r"\btaken for\b": '"treated as", "read as"',
    r"\b(?:hears?|heard)\b(?! from| \d| *\Z)": '"receives", "learns"',
    r"\b(?:lends?|lent)\b": '"borrows", "passes"',
    r"\bweigh(?:s|ed|ing)?\b": '"weight", "multiply by"',
    r"\b(?:brings?|brought|bringing)\b": '"sends", "has", "contributes"',
    r"\bmend(?:s|ed|ing)?\b": '"fixes"',
    r"\btold\b(?! apart)": '"reported", "sent", "informed"',
    r"\banew\b": '"again", "from scratch"',
}
"""Patterns of what is refused, in any case, and what to write in its place."""

_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+).*?\1", re.DOTALL)
_READ = ("README.md", "docs/**/*.md", "packages/*/README.md", "packages/*/src/**/*.py")


def find_tics(root: Path) -> Iterator[str]:
    """Finds refused wordings in pages and sources."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    allowed = set(project["tool"]["towers"].get("allowed_words", []))
    patterns = {re.compile(one, re.I | re.M): hint for one, hint in TICS.items()}
    for file in sorted(file for one in _READ for file in root.glob(one)):
        place = str(file.relative_to(root))
        for start, text in prose(file):
            for pattern, hint in patterns.items():
                for match in pattern.finditer(text):
                    words = " ".join(match[0].split())
                    if f"{place}: {words}" not in allowed:
                        line = start + text.count("\n", 0, match.start())
                        yield f'{place}:{line} "{words}": write {hint}.'


def prose(file: Path) -> Iterator[tuple[int, str]]:
    """Yields a file's prose without code, each piece with its first line."""
    text = file.read_text()
    if file.suffix == ".md":
        yield 1, _blank(_CODE, _blank(_FENCE, text))
        return
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Constant(value=str(said)) if " " in said:
                yield node.lineno, _blank(_CODE, said)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], _blank(_CODE, token.string)


def _blank(pattern: re.Pattern[str], text: str) -> str:
    """Puts an x for all that matches, and keeps the lines."""
    return pattern.sub(lambda match: "x" + "\n" * match[0].count("\n"), text)
