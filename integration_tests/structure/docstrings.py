"""Docstrings with sections on private names, which ``nox -s lint`` refuses."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from interfaces.api_lines import load

_SECTION = re.compile(r"^\s*(Args|Returns|Raises|Attributes):$", re.MULTILINE)
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def find_private_sections(root: Path) -> Iterator[str]:
    """Finds docstrings with sections on names that no interface file lists."""
    for folder in sorted(root.glob("packages/*/src/*")):
        public = set(_shown(load(folder.name, folder.parent)))
        for file in sorted(folder.rglob("*.py")):
            for owner, node in _with_owners(ast.parse(file.read_text())):
                documented = owner if node.name in _CONSTRUCTORS and owner else node
                if (str(file), documented.name, documented.end_lineno) in public:
                    continue
                if _SECTION.search(ast.get_docstring(node) or ""):
                    yield (
                        f"{file.relative_to(root)}:{node.lineno} {node.name} is "
                        f"private: one line; sections are for the public."
                    )


def _with_owners(tree: ast.AST) -> Iterator[tuple[ast.ClassDef | None, Definition]]:
    """Yields functions and classes, with the class around them."""
    for node in ast.walk(tree):
        owner = node if isinstance(node, ast.ClassDef) else None
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Definition):
                yield owner, child


def _shown(member: Any) -> Iterator[tuple[str, str, int]]:
    """Yields file, name and last line of all that a package's interface shows."""
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
