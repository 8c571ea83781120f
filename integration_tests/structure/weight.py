"""Weighs the packages: lines, files, folders, refusals, helpers that are used once.

Run by ``nox -s structure``; ``--list`` prints what was counted. What is too heavy is
refused by ``nox -s lint`` (``structure.limits``).
"""

import argparse
import ast
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from structure.limits import ROOT, lines_of, module_imports, settings, sources

_REFUSES = re.compile(r"_?(check|refuse|require|raise)(_|$)")
_SMALL = 8

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


def find_small_helpers() -> list[str]:
    """Lists private functions of at most eight lines that are named once elsewhere."""
    used: Counter[str] = Counter()
    small = []
    for file in sources(ROOT):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Name):
                used[node.id] += 1
            elif isinstance(node, ast.Attribute):
                used[node.attr] += 1
            elif isinstance(node, ast.FunctionDef) and _is_small_helper(node):
                small.append((node.name, f"{file.relative_to(ROOT)}:{node.lineno}"))
    return [f"{place} {name}" for name, place in small if used[name] == 1]


def main() -> None:
    """Prints what was weighed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print what was counted")
    options = parser.parse_args()
    budgets, lines = settings(ROOT)["towers"]["budgets"], lines_of(ROOT)
    single_use = []
    print("| package | lines | budget | files | in one folder |\n|---|---|---|---|---|")
    for package, count in lines.items():
        folders = Counter(file.parent for file in sources(ROOT, package))
        print(
            f"| {package} | {count:,} | {budgets[package]:,} | {folders.total()} "
            f"| {max(folders.values())} |"
        )
        imports = module_imports(ROOT, package)
        importers = Counter(name for imported in imports.values() for name in imported)
        single_use += [name for name in imports if importers[name] == 1]
    print(f"| all | {sum(lines.values()):,} | {sum(budgets.values()):,} | | |")
    refusals = [
        r for file in sources(ROOT) for r in find_refusals(file, file.read_text())
    ]
    helpers = find_small_helpers()
    print(f"\n| files | {len(sources(ROOT))} |")
    print(f"| lines that check or refuse | {sum(one.lines for one in refusals):,} |")
    print(f"| small helpers that are used once | {len(helpers)} |")
    print(f"| modules with one importer | {len(single_use)} |")
    if options.list:
        for one in refusals:
            print(f"{one.file.relative_to(ROOT)}:{one.first} {one.lines}")
        print(*helpers, *single_use, sep="\n")


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


def _is_small_helper(node: ast.FunctionDef) -> bool:
    is_private = node.name.startswith("_") and not node.name.startswith("__")
    return is_private and (node.end_lineno or 0) - node.lineno < _SMALL


if __name__ == "__main__":
    main()
