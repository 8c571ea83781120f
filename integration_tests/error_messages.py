"""What the packages refuse and warn of, read from their sources.

The pages below ``docs/errors/`` explain every sentence that says what to do, and
every public class of errors; ``test_docs_errors.py`` compares.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HOLE = "…"  # stands for what differs: a name, a number
MIN_WORDS = 4
# What follows a message's first statement, and says what is there, not what to do.
_FINDING = re.compile(r"(got|known are|there are|here|which|inputs are|tower… )\b")
_VERBS = (
    "add answer ask build call cast change check compile compose compute convert "
    "correct cut do drop encode end enter evaluate export fill freeze give have hand "
    "install join keep leave let load look lower make name open pad pass put raise "
    "reduce register restart return run save set start take tell trace train use wait "
    "wrap write"
).replace(" ", "|")
_REMEDY = re.compile(rf"[;:.,] (?:then |or |and |else )?(?:{_VERBS}) [\w'`(…-]", re.I)
_OUTSIDE = re.compile(r"must be (?:called|made)|outside")
_RAISES = re.compile(r"(?:Error|Warning)$")
_WARNS = re.compile(r"(?:^|\.)(?:warn|warning|error)$")
_FORMAT = re.compile(r"%(?:\(\w+\))?[.\d]*[sdrf]")


@dataclass(frozen=True)
class Message:
    """A message of a package.

    Attributes:
      package: as in ``tw-core``.
      kind: the class that is raised with it; ``logged`` or ``warned``; empty where
        the source does not say, as for a part of a message.
      text: with ``…`` for what is filled in.
      place: file and line.
    """

    package: str
    kind: str
    text: str
    place: str

    @property
    def has_remedy(self) -> bool:
        """Whether it says what to do, or why it refuses."""
        found = bool(_REMEDY.search(self.text))
        if not self.kind:
            return found
        later = re.split(r"[.;?]\s+|\n", self.text)[1:]
        told = [p for p in later if p.strip(f"{HOLE} .,") and not _FINDING.match(p)]
        return found or bool(told) or bool(_OUTSIDE.search(self.text))

    @property
    def line(self) -> str:
        """The message on one line, as pages show it."""
        return " ".join(self.text.split())


def find_messages(root: Path) -> list[Message]:
    """Lists the messages of all packages of a tree, each once, in order."""
    found = {}
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        package = path.relative_to(root).parts[1]
        for line, kind, text in _strings(ast.parse(path.read_text("utf-8")), ""):
            if len(text.split()) >= MIN_WORDS:
                place = f"{path.relative_to(root)}:{line}"
                message = Message(package, kind, text, place)
                found.setdefault((package, message.line), message)
    return list(found.values())


def find_classes(root: Path) -> dict[str, str]:
    """Lists the public classes of errors and warnings, and where they are public."""
    interfaces = sorted(root.glob("packages/*/api.txt"))
    lines = [line for path in interfaces for line in path.read_text().splitlines()]
    named = re.compile(r"class ([\w.]+)\.(\w+(?:Error|Warning|Exception))\b")
    return {match[2]: match[1] for line in lines if (match := named.match(line))}


def _strings(node: ast.AST, kind: str) -> Iterator[tuple[int, str, str]]:
    """Finds the strings below ``node`` that are no docstrings: line, kind, text."""
    text = _text(node)
    if text is not None:
        yield node.lineno, kind, _FORMAT.sub(HOLE, text)
        return
    if isinstance(node, ast.Call):
        kind = _kind(ast.unparse(node.func)) or kind
    for child in ast.iter_child_nodes(node):
        is_docstring = isinstance(child, ast.Expr) and isinstance(
            child.value, ast.Constant
        )
        if not is_docstring:
            yield from _strings(child, kind)


def _kind(function: str) -> str:
    """Says of a call's function what becomes of the message."""
    if _WARNS.search(function):
        return "warned" if function.endswith("warn") else "logged"
    if _RAISES.search(function):
        *_, name = re.split(r"[. ]", function)
        return name
    return "NotImplementedError" if function.endswith("refuse") else ""


def _text(node: ast.AST) -> str | None:
    """Returns a string with holes; None for what is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) or HOLE for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return _text(node.left)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        if left is not None or right is not None:
            return (left or HOLE) + (right or HOLE)
    return None
