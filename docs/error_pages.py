"""The page of messages: those whose cause they cannot say, by their first words.

``causes.toml`` has the causes. Messages are read from the packages' source; each is a
heading, so that the site's search finds its words. A message and a cause meet by the
words that they share, so that a message may be reworded.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = "errors/messages"
CAUSES = ROOT / "docs" / "errors" / "causes.toml"
HOLE = "…"  # stands for what differs: a name, a number
MIN_WORDS = 4
MIN_SHARED = 0.7  # of a cause's words, or no message has it
_VERBS = (
    "add answer ask build call cast change check compile compose compute convert "
    "correct cut do drop encode end enter evaluate export fill freeze give have hand "
    "install join keep leave let load look lower make name open pad pass put raise "
    "reduce register restart return run save set start take tell trace train use wait "
    "wrap write"
).replace(" ", "|")
_REMEDY = re.compile(rf"[;:.,] (?:then |or |and |else )?(?:{_VERBS}) [\w'`(…-]", re.I)
_RAISES = re.compile(r"(?:Error|Warning)$")
_WARNS = re.compile(r"(?:^|\.)(?:warn|warning|error)$")
_FORMAT = re.compile(r"%(?:\(\w+\))?[.\d]*[sdrf]")


@dataclass(frozen=True)
class Message:
    """A message of a package."""

    # The class that is raised with it; ``logged`` or ``warned``; empty where the source
    # does not say, as for a part of a message
    kind: str
    text: str  # on one line, with ``…`` for what is filled in
    package: str  # ``tw-core``

    @property
    def is_shown(self) -> bool:
        """Whether it is a message, or a part that says what to do."""
        return bool(self.kind or _REMEDY.search(self.text))

    @property
    def words(self) -> set[str]:
        return _words(self.text)


def find_messages(package: Path) -> list[Message]:
    """Lists the messages of a package's folder, each once, in order."""
    return [message for message in _read(package) if message.is_shown]


def find_causes(messages: list[Message]) -> tuple[dict[str, str], list[str]]:
    """Finds the messages that causes are for, among those of all packages.

    Returns a message's text -> its cause; and words of causes that no message has any
    more, which the pages leave out.
    """
    causes = tomllib.loads(CAUSES.read_text("utf-8"))
    found, lost = {}, []
    for title, cause in causes.items():
        wanted = _words(title)
        shared = {m.text: len(wanted & m.words) / len(wanted) for m in messages}
        best = max(shared, key=lambda text: (shared[text], -len(text)))
        if shared[best] < MIN_SHARED or best in found:
            lost.append(title)
        else:
            found[best] = cause.strip()
    return found, lost


def find_explained() -> dict[str, tuple[Message, str]]:
    """Finds the messages of all packages that have a cause, in order of their words.

    Returns a message's heading, its statement -> the message and its cause.
    """
    packages = sorted(ROOT.glob("packages/tw-*"))
    messages = [message for package in packages for message in find_messages(package)]
    causes, _ = find_causes(messages)
    found = {}
    for message in messages:
        if message.text in causes:
            found.setdefault(_title(message.text), (message, causes[message.text]))
    return dict(sorted(found.items(), key=lambda item: _first_words(item[0])))


def render() -> str:
    """Returns the sections of the page: for each message, kind and cause."""
    parts = []
    for title, (message, cause) in find_explained().items():
        parts += [f"## {_code(title)}", _rest(title, message), cause]
    return "\n\n".join(parts) + "\n"


@cache  # all packages are read for the causes of each one's page
def _read(package: Path) -> tuple[Message, ...]:
    """Reads the strings of a package that may be messages."""
    found = {}
    modules = next(package.glob("src/*"))
    for path in sorted(modules.rglob("*.py")):
        for kind, text in _strings(ast.parse(path.read_text("utf-8")), ""):
            line = " ".join(text.split())
            if len(text.split()) >= MIN_WORDS:
                found.setdefault(line, Message(kind, line, package.name))
    return tuple(found.values())


def _title(text: str) -> str:
    """Returns the statement of a message, without who refuses and what to do."""
    named = re.sub(rf"^[\w.{HOLE}-]+: ", "", text)
    statement = re.split(r"; |(?<!e\.g)\. ", named)[0]
    return statement if re.search(r"\w{3}", statement) else text


def _rest(title: str, message: Message) -> str:
    """Says what stands around a title in its message, which is not said twice."""
    kind = message.kind[:1].upper() + message.kind[1:] or "Part of a message"
    before, _, after = message.text.partition(title)
    refuses, advice = before.rstrip(" :").strip(HOLE), after.lstrip(" ;.")
    home = f" of {message.package}" + (f", {_code(refuses)}" if refuses else "")
    return f"**{kind}**{home}" + (f": {_code(advice)}" if advice else "")


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _first_words(title: str) -> str:
    """Returns the letters by which a message is looked up: not a name or a number."""
    return " ".join(re.findall(r"\w+", title)).casefold()


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w{2,}|--[\w-]+", text.lower()))


def add_messages(app, docname, source):
    """Adds the messages to their page."""
    if docname == PAGE:
        for path in (CAUSES, *ROOT.glob("packages/*/src/**/*.py")):
            app.env.note_dependency(str(path))
        source[0] += "\n" + render()


def setup(app):
    """Writes the page as Sphinx reads it."""
    app.connect("source-read", add_messages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _strings(node: ast.AST, kind: str) -> Iterator[tuple[str, str]]:
    """Finds the strings below ``node`` that are not docstrings: kind and text."""
    text = _text(node)
    if text is not None:
        yield kind, _FORMAT.sub(HOLE, text)
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
    """Returns the kind of a message that is passed to a function."""
    if _WARNS.search(function):
        return "warned" if function.endswith("warn") else "logged"
    if _RAISES.search(function):
        *_, name = re.split(r"[. ]", function)
        return name
    return "NotImplementedError" if function.endswith("refuse") else ""


def _text(node: ast.AST) -> str | None:
    """Returns a string with holes; None for anything else."""
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
