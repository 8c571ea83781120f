"""Weighs the packages: lines, refusals, helpers used once, docstrings.

Run by ``nox -s structure``, which fails if a package has grown beyond its budget in the
root ``pyproject.toml``, and by ``nox -s lint`` with ``--docstrings``, which fails if a
private name has a docstring with sections. ``--list`` prints what was counted.
"""

import argparse
import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import griffe
from interfaces.api_lines import load

ROOT = Path(__file__).parents[2]
GRACE = 1.03
"""A package may have so many times the lines of its budget."""

_SECTION = re.compile(r"^\s*(Args|Returns|Raises|Attributes):$", re.MULTILINE)
_REFUSES = re.compile(r"_?(check|refuse|require|raise)(_|$)")
_SMALL = 8
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Refusal:
    """Lines of code that check, or that make the text of an error.

    Attributes:
      file: where they are.
      first: number of the first line.
      lines: how many there are, without docstrings, comments and empty lines.
    """

    file: Path
    first: int
    lines: int


def sources() -> list[Path]:
    """Lists the packages' source files."""
    return sorted(ROOT.glob("packages/*/src/**/*.py"))


def definitions(tree: ast.AST) -> Iterator[Definition]:
    """Yields all functions and classes of a tree."""
    for node in ast.walk(tree):
        if isinstance(node, Definition):
            yield node


def count_lines() -> dict[str, int]:
    """Counts each package's lines, docstrings and empty ones included."""
    counts: Counter[str] = Counter()
    for file in sources():
        counts[_package(file)] += len(file.read_text().splitlines())
    return dict(sorted(counts.items()))


def find_refusals(file: Path, text: str) -> list[Refusal]:
    """Finds what checks or refuses in a file.

    Functions whose names say so count as a whole; elsewhere ``raise`` statements, the
    ``if`` around nothing but them, and calls of such functions as statements.

    >>> text = '''
    ... def f(a):
    ...     _check_kind("f", a)
    ...     if not a:
    ...         raise ValueError(
    ...             "empty"
    ...         )
    ...     return a
    ... '''
    >>> sum(one.lines for one in find_refusals(Path("f.py"), text))
    5
    """
    tree = ast.parse(text)
    code = _code_lines(tree, text)
    found, seen = [], set[int]()
    for node in ast.walk(tree):  # outer ones first
        lines = set(range(node.lineno, node.end_lineno + 1)) if _refuses(node) else ()
        new = (set(lines) & code) - seen
        if new:
            seen |= new
            found.append(Refusal(file, min(new), len(new)))
    return sorted(found, key=lambda one: one.first)


def find_dust() -> tuple[list[str], list[str]]:
    """Finds small private helpers that are used once, and modules with one importer.

    Returns:
      "file:line name" of private functions of at most eight lines that are named once
      beside their definition, in all packages; modules that one other module imports.
    """
    trees = {file: ast.parse(file.read_text()) for file in sources()}
    used: Counter[str] = Counter()
    importers: dict[str, set[Path]] = {}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                used[node.id] += 1
            elif isinstance(node, ast.Attribute):
                used[node.attr] += 1
            elif isinstance(node, ast.ImportFrom) and node.module:
                for name in (
                    node.module,
                    *(f"{node.module}.{a.name}" for a in node.names),
                ):
                    importers.setdefault(name, set()).add(file)
    helpers = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file, tree in trees.items()
        for node in definitions(tree)
        if not isinstance(node, ast.ClassDef) and _is_small_helper(node)
        if used[node.name] == 1
    ]
    modules = [
        name
        for file in trees
        if file.stem != "__init__"
        for name in [_module(file)]
        if len(importers.get(name, ())) == 1
    ]
    return helpers, modules


def find_private_sections() -> list[str]:
    """Finds docstrings with sections on names that no ``api.txt`` lists."""
    public = {one for package in _packages() for one in _public(package)}
    found = []
    for file in sources():
        for owner, node in _with_owners(ast.parse(file.read_text())):
            documented = owner if node.name in _CONSTRUCTORS and owner else node
            if (str(file), documented.name, documented.end_lineno) in public:
                continue
            if _SECTION.search(ast.get_docstring(node) or ""):
                found.append(f"{file.relative_to(ROOT)}:{node.lineno} {node.name}")
    return found


def budgets() -> dict[str, int]:
    """Reads the budgets of lines."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return dict(settings["tool"]["towers"]["budgets"])


def main() -> int:
    """Prints what was weighed; returns 1 where something is too heavy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docstrings", action="store_true", help="check these alone")
    parser.add_argument("--list", action="store_true", help="print what was counted")
    options = parser.parse_args()
    if options.docstrings:
        described = find_private_sections()
        for line in described:
            print(f"{line}: a private name has one line; sections are for the public.")
        return 1 if described else 0
    allowed, lines = budgets(), count_lines()
    print("| package | lines | budget |\n|---|---|---|")
    for package, count in lines.items():
        print(f"| {package} | {count:,} | {allowed[package]:,} |")
    print(f"| all | {sum(lines.values()):,} | {sum(allowed.values()):,} |")
    refusals = [one for file in sources() for one in _refusals_of(file)]
    helpers, modules = find_dust()
    print(f"\n| files | {len(sources())} |")
    print(f"| lines that check or refuse | {sum(one.lines for one in refusals):,} |")
    print(f"| small helpers that are used once | {len(helpers)} |")
    print(f"| modules with one importer | {len(modules)} |")
    if options.list:
        for one in refusals:
            print(f"{one.file.relative_to(ROOT)}:{one.first} {one.lines}")
        print(*helpers, *modules, sep="\n")
    heavy = [name for name, n in lines.items() if n > GRACE * allowed[name]]
    for name in heavy:
        print(f"{name} has more lines than its budget in pyproject.toml allows.")
    return 1 if heavy else 0


def _refusals_of(file: Path) -> list[Refusal]:
    return find_refusals(file, file.read_text())


def _refuses(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef):
        return bool(_REFUSES.match(node.name))
    if isinstance(node, ast.If):
        return not node.orelse and all(isinstance(s, ast.Raise) for s in node.body)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        name = getattr(called, "attr", getattr(called, "id", ""))
        return bool(_REFUSES.match(name))
    return isinstance(node, ast.Raise) and node.exc is not None


def _code_lines(tree: ast.AST, text: str) -> set[int]:
    """Numbers the lines that are code."""
    lines = text.splitlines()
    code = {n for n, one in enumerate(lines, 1) if one.strip()[:1] not in ("", "#")}
    for node in ast.walk(tree):
        if isinstance(node, Definition | ast.Module) and ast.get_docstring(node):
            docstring = node.body[0]
            code -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return code


def _is_small_helper(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    is_private = node.name.startswith("_") and not node.name.startswith("__")
    return is_private and (node.end_lineno or 0) - node.lineno < _SMALL


def _with_owners(tree: ast.AST) -> Iterator[tuple[ast.ClassDef | None, Definition]]:
    """Yields functions and classes, with the class around them."""
    for node in ast.walk(tree):
        owner = node if isinstance(node, ast.ClassDef) else None
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Definition):
                yield owner, child


def _packages() -> list[str]:
    return sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))


def _package(file: Path) -> str:
    return file.relative_to(ROOT / "packages").parts[0]


def _module(file: Path) -> str:
    parts = file.relative_to(ROOT / "packages" / _package(file) / "src").parts
    return ".".join(parts).removesuffix(".py")


def _public(package: str) -> Iterator[tuple[str, str, int]]:
    """Yields file, name and last line of all that a package's interface shows."""
    sources = ROOT / "packages" / package / "src"
    yield from _shown(load(package.replace("-", "_"), sources))


def _shown(member: Any) -> Iterator[tuple[str, str, int]]:
    try:
        target = member.final_target if member.is_alias else member
    except (griffe.AliasResolutionError, griffe.CyclicAliasError):
        return
    if target.endlineno:
        yield str(target.filepath), target.name, target.endlineno
    if target.is_module or target.is_class:
        for inner in target.all_members.values():
            if inner.is_public:
                yield from _shown(inner)


if __name__ == "__main__":
    sys.exit(main())
