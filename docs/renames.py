"""Lists what a package renamed, for the page docs/migration/from_0_1.md.

Names are those of the tables in the package's module ``_renamed``. Arguments and
attributes are found in its source, where the decorators and the property of
``tw_core.renames`` say beside the new name what the old one was.
"""

import ast
from collections.abc import Iterator, Mapping
from importlib import import_module, util
from pathlib import Path
from typing import Any

Pairs = Iterator[tuple[str, str]]
# What the warning of ``tw_core.renames.takes_caller`` says to use.
CALLER = {"caller": "with tw_core.checks.naming(...)"}


def renames(module: str) -> list[tuple[str, str]]:
    """Lists (old, new) of a package's names, arguments and attributes."""
    folder = Path(util.find_spec(module).origin).parent
    has_tables = (folder / "_renamed.py").exists()
    tables = vars(import_module(f"{module}._renamed")) if has_tables else {}
    found = list(public_names(module, tables))
    for path in sorted(folder.rglob("*.py")):
        found += _inside(ast.parse(path.read_text(encoding="utf-8")), "", tables)
    return found


def public_names(module: str, tables: Mapping[str, Any]) -> Pairs:
    """Lists the entries of ``NAMES``; ``CLUSTER_NAMES`` is of the module `cluster`."""
    for own, entries in tables.items():
        if isinstance(entries, dict) and own.endswith("NAMES"):
            part = own.removesuffix("NAMES").strip("_").lower()
            home = f"{module}.{part}" if part else module
            yield from ((f"{home}.{old}", new) for old, new in entries.items())


def _inside(node: ast.AST, owner: str, tables: Mapping[str, Any]) -> Pairs:
    """Lists the arguments and attributes that a file renames."""
    for child in ast.iter_child_nodes(node):
        decorators = getattr(child, "decorator_list", None)
        name = "" if decorators is None or child.name == "__init__" else child.name
        inner = ".".join(filter(None, (owner, name)))
        for decorator in decorators or ():
            for old, new in _arguments(decorator, tables).items():
                is_name = new.isidentifier()
                yield f"{inner}({old}=...)", f"{inner}({new}=...)" if is_name else new
        if isinstance(child, ast.Assign) and _calls(child.value, "renamed_attribute"):
            new = ast.literal_eval(child.value.args[0])
            yield f"{owner}.{child.targets[0].id}", f"{owner}.{new}"
        yield from _inside(child, inner, tables)


def _arguments(decorator: ast.expr, tables: Mapping[str, Any]) -> dict[str, str]:
    """Reads what a decorator such as ``renamed_arguments(old="new")`` renames.

    A new name may come with what converts the value, as in ``old=("new", convert)``.
    """
    if ast.unparse(decorator).endswith("takes_caller"):
        return CALLER
    if not _calls(decorator, "renamed_arguments"):
        return {}
    found = {}
    for keyword in decorator.keywords:
        if keyword.arg:
            is_converted = isinstance(keyword.value, ast.Tuple)
            new = keyword.value.elts[0] if is_converted else keyword.value
            found[keyword.arg] = new.value
        else:
            table = tables[ast.unparse(keyword.value).rpartition(".")[2]]
            news = (new[0] if isinstance(new, tuple) else new for new in table.values())
            found |= zip(table, news, strict=True)
    return found


def _calls(node: ast.AST, function: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith(function)
