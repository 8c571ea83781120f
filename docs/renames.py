"""Lists what a package renamed, for the page docs/migration/from_0_1.md.

Names are those of the tables in the package's module ``_renamed``. Arguments and
attributes are found in its source, where ``renamed_arguments`` and
``renamed_attribute`` say beside the new name what the old one was.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from importlib import import_module, util
from pathlib import Path
from typing import Any

Pairs = Iterator[tuple[str, str]]
_OLD = re.compile(r"\((\w+)=\.\.\.\)")


def renames(module: str) -> list[tuple[str, str]]:
    """Lists (old, new) of a package's names, arguments and attributes."""
    folder = Path(util.find_spec(module).origin).parent
    table = folder / "_renamed.py"
    tables = vars(import_module(f"{module}._renamed")) if table.exists() else {}
    made = made_decorators(table) if table.exists() else {}
    found = list(public_names(module, tables))
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += _inside(tree, "", {**tables, **made})
    return found


def public_names(module: str, tables: Mapping[str, Any]) -> Pairs:
    """Lists the entries of ``NAMES``; ``CLUSTER_NAMES`` is of the module `cluster`."""
    for own, entries in tables.items():
        if isinstance(entries, dict) and own.endswith("NAMES"):
            part = own.removesuffix("NAMES").strip("_").lower()
            home = f"{module}.{part}" if part else module
            yield from ((f"{home}.{old}", new) for old, new in entries.items())


def made_decorators(path: Path) -> dict[str, dict[str, str]]:
    """Reads the decorators that a file makes: by calling one, or as a function.

    A function warns of the old argument itself, and says in words what to use.
    """
    made = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            made[node.targets[0].id] = _arguments(node.value, {})
        elif isinstance(node, ast.FunctionDef):
            old = _OLD.search(ast.unparse(node))
            calls = [n for n in ast.walk(node) if _calls(n, "warn_renamed")]
            said = [
                n.args[1].value for n in calls if isinstance(n.args[1], ast.Constant)
            ]
            made[node.name] = {old[1]: said[0]} if old and said else {}
    return {name: pairs for name, pairs in made.items() if pairs}


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
    """Reads what a decorator such as ``renamed_arguments(old="new")`` renames."""
    if isinstance(decorator, ast.Name | ast.Attribute):
        found = tables.get(ast.unparse(decorator).rpartition(".")[2])
        return found if isinstance(found, dict) else {}
    if _calls(decorator, "converted_argument"):
        return {decorator.args[0].value: decorator.args[1].value}
    if not _calls(decorator, "renamed_arguments"):
        return {}
    found = {}
    for keyword in decorator.keywords:
        if keyword.arg:
            found[keyword.arg] = keyword.value.value
        else:
            found |= tables[ast.unparse(keyword.value).rpartition(".")[2]]
    return found


def _calls(node: ast.AST, function: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith(function)
