"""Measures how each package is built: modules, folders, import floors, lines.

Run by ``nox -s structure``. Imports under ``TYPE_CHECKING`` count. The folders'
``__init__`` files are not counted as modules; what they import for lazy exports says
nothing about who depends on whom, and is left out as well.
"""

import argparse
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

if __name__ == "__main__":  # Help and wrong options need no library.
    argparse.ArgumentParser(description=__doc__).parse_args()

import grimp

PACKAGES = ("ampopt", "builders", "core", "reduce", "rlload", "syncrep")


@dataclass(frozen=True)
class Shape:
    """What is counted of one package.

    Attributes:
      modules: number of modules.
      largest_folder: modules directly in the folder that holds most of them.
      floors: modules on the longest chain of imports.
      lines: lines of all files, ``__init__`` files included.
      single_use: modules that exactly one other module imports.
      on_circles: modules that import themselves by way of others.
    """

    modules: int
    largest_folder: int
    floors: int
    lines: int
    single_use: int
    on_circles: tuple[str, ...]


def measure(package: str, sources: Path) -> Shape:
    """Counts one package.

    Args:
      package: its top-level module, importable.
      sources: the folder of that module.
    """
    imports = module_imports(package)
    files = list(sources.rglob("*.py"))
    modules = [file for file in files if file.stem != "__init__"]
    importers = Counter(name for imported in imports.values() for name in imported)
    return Shape(
        modules=len(modules),
        largest_folder=max(Counter(file.parent for file in modules).values()),
        floors=longest_chain(imports),
        lines=sum(len(file.read_text().splitlines()) for file in files),
        single_use=sum(importers[name] == 1 for name in imports),
        on_circles=on_circles(imports),
    )


def module_imports(package: str) -> dict[str, frozenset[str]]:
    """Maps each module of a package to the modules of the package that it imports."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=False)
    folders = {name for name in graph.modules if graph.find_children(name)}
    return {
        name: frozenset(graph.find_modules_directly_imported_by(name) - folders)
        for name in graph.modules - folders
    }


def longest_chain(imports: dict[str, frozenset[str]]) -> int:
    """Counts the modules on the longest chain of imports; circles are cut.

    >>> longest_chain({"a": {"b", "c"}, "b": {"c"}, "c": frozenset()})
    3
    """
    entered: set[str] = set()

    @cache
    def floors_below(name: str) -> int:
        entered.add(name)
        below = [floors_below(n) for n in sorted(imports[name]) if n not in entered]
        entered.discard(name)
        return 1 + max(below, default=0)

    return max(map(floors_below, imports), default=0)


def on_circles(imports: dict[str, frozenset[str]]) -> tuple[str, ...]:
    """Lists the modules that import themselves by way of others.

    >>> on_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}})
    ('b', 'c')
    """
    return tuple(sorted(n for n in imports if n in _reachable(n, imports)))


def _reachable(start: str, imports: dict[str, frozenset[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = list(imports[start])
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting.extend(imports[name])
    return reached


def table(shapes: dict[str, Shape]) -> str:
    """Renders a Markdown table, a row per package and one for all."""
    rows = [
        "| package | modules | largest folder | floors | lines | with one importer |",
        "|---|---|---|---|---|---|",
    ]
    for name, shape in shapes.items():
        rows.append(
            f"| {name} | {shape.modules} | {shape.largest_folder} | {shape.floors} | "
            f"{shape.lines:,} | {shape.single_use} |"
        )
    every = list(shapes.values())
    rows.append(
        f"| all | {sum(s.modules for s in every)} "
        f"| {max(s.largest_folder for s in every)} | {max(s.floors for s in every)} "
        f"| {sum(s.lines for s in every):,} | {sum(s.single_use for s in every)} |"
    )
    return "\n".join(rows)


def main() -> None:
    """Prints the table of this checkout."""
    root = Path(__file__).parents[2]
    shapes = {}
    for name in PACKAGES:
        module = f"tw_{name}"
        sources = root / "packages" / f"tw-{name}" / "src" / module
        shapes[f"tw-{name}"] = measure(module, sources)
    print(table(shapes))
    for name, shape in shapes.items():
        if shape.on_circles:
            print(f"{name} has circles: {', '.join(shape.on_circles)}")


if __name__ == "__main__":
    main()
