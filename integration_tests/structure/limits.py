"""The limits of the packages as a whole that ``nox -s lint`` enforces.

The packages are the folders below ``packages``. Everything is read from the source and
nothing is imported; imports inside functions and under ``TYPE_CHECKING`` count.
"""

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from graphlib import CycleError
from pathlib import Path
from typing import Any

from interfaces.api_lines import INTERNAL
from interfaces.manifest import find_manifests, needed_by, read_manifests
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from structure.docstrings import find_private_sections
from structure.durations import find_slow
from structure.words import find_tics

ROOT = Path(__file__).parents[2]
GRACE = 1.03
"""A package may have so many times the lines of its budget."""
FILES = 13
_WORD = re.compile(r"\w+")
# `packages/…/a.py`, `a.py`, `_room/a.py`, `_room/`, `_name`; NAME stands for any.
_NAMED = re.compile(r"`((?!\S*NAME)(?:(?:packages|_\w+)/[\w./-]*\.py|\w+\.py|_\w+/?))`")


def sources(root: Path, package: str = "*", ending: str = "py") -> list[Path]:
    """Lists the source files of a package, or of all."""
    return sorted(root.glob(f"packages/{package}/src/**/*.{ending}"))


def settings(root: Path) -> dict[str, Any]:
    """Reads the tools' settings in the root's pyproject.toml."""
    return dict(tomllib.loads((root / "pyproject.toml").read_text())["tool"])


def lines_of(root: Path) -> dict[str, int]:
    """Counts each package's lines, docstrings and empty ones included."""
    return {
        package: sum(
            len(one.read_text().splitlines()) for one in sources(root, package)
        )
        for package in find_manifests(root)
    }


def find_heavy(root: Path) -> Iterator[str]:
    """Finds packages that have outgrown their budget."""
    budgets = settings(root)["towers"]["budgets"]
    for package, lines in lines_of(root).items():
        allowed = budgets.get(package, 0)
        if lines > GRACE * allowed:
            yield (
                f"{package} has {lines:,} lines, more than 3 % above its budget of "
                f"{allowed:,} in pyproject.toml."
            )


def find_crowded(root: Path) -> Iterator[str]:
    """Finds folders with too many files."""
    for folder, files in Counter(one.parent for one in sources(root)).items():
        if files > FILES:
            yield (
                f"{folder.relative_to(root)} has {files} files; at most {FILES} show "
                f"the parts of a package. Make a folder of those that belong together."
            )


def find_circles(root: Path) -> Iterator[str]:
    """Finds modules of a package that import each other, by way of others too."""
    for package in find_manifests(root):
        for circle in circles(module_imports(root, package)):
            yield f"{package}: these modules import each other: {', '.join(circle)}."


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups the modules that reach themselves, those of one circle together.

    >>> circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}})
    [['b', 'c']]
    """

    @cache
    def reached(start: str) -> frozenset[str]:
        found, waiting = set[str](), [start]
        while waiting:
            new = imports[waiting.pop()] - found
            found |= new
            waiting += new
        return frozenset(found)

    found = {
        tuple(sorted(other for other in reached(name) if name in reached(other)))
        for name in imports
    }
    return sorted(list(group) for group in found if group[1:])


def module_imports(root: Path, package: str) -> dict[str, set[str]]:
    """Maps each module of a package to those of the package that it imports.

    A name that a folder's stub exports counts as an import of the module that has it.
    """
    modules = {module_of(one): one for one in sources(root, package)}
    homes = {
        f"{module_of(stub)}.{alias.asname}": f"{home}.{alias.name}"
        for stub in sources(root, package, "pyi")
        for home, alias in exported(stub)
    }

    def resolve(name: str) -> str:
        """Finds the module that has a name; empty if it is none of the package's."""
        while name and name not in modules:
            name = homes.get(name) or name.rpartition(".")[0]
        return name

    return {
        module: {found for _, name in imported(file) if (found := resolve(name))}
        - {module}
        for module, file in modules.items()
    }


def exported(stub: Path) -> Iterator[tuple[str, ast.alias]]:
    """Yields the exports of a stub, each with the module that it comes from."""
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            yield from ((absolute(stub, node), alias) for alias in node.names)


def imported(file: Path) -> Iterator[tuple[int, str]]:
    """Yields what a file imports or reaches through an import: line, full name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = absolute(file, node)
            yield from ((node.lineno, f"{home}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("tw_"):
            yield node.lineno, ast.unparse(node)


def absolute(file: Path, node: ast.ImportFrom) -> str:
    """Returns the full name of the module that an import names."""
    if not node.level:
        return node.module or ""
    folder = file.parents[node.level - 1]
    parts = folder.parts[folder.parts.index("src") + 1 :]
    return ".".join((*parts, *([node.module] if node.module else [])))


def module_of(file: Path) -> str:
    """Returns the name by which a source file is imported."""
    parts = file.with_suffix("").parts
    return ".".join(parts[parts.index("src") + 1 :]).removesuffix(".__init__")


def from_siblings(root: Path, package: str) -> Iterator[tuple[str, str, str]]:
    """Yields what a package imports from others of ours: place, sibling, its name."""
    modules = {one.module: name for name, one in find_manifests(root).items()}
    for file in sources(root, package):
        for line, name in imported(file):
            sibling = modules.get(name.partition(".")[0], package)
            if sibling != package:
                yield f"{file.relative_to(root)}:{line}", sibling, name


def find_trespasses(root: Path) -> Iterator[str]:
    """Finds imports of siblings' private names."""
    for package in find_manifests(root):
        for place, sibling, name in from_siblings(root, package):
            if any(part.startswith("_") for part in name.split(".")):
                yield f"{place} imports {name}, which is private to {sibling}."


def find_private_members(root: Path) -> Iterator[str]:
    """Finds private members of others outside of ``_keras_compat.py``, if there is one.

    Those of a class itself, inherited or overridden, are read from ``self``.
    """
    allowed = settings(root)["towers"].get("allowed_members", [])
    for room in root.glob("packages/*/src/*/_keras_compat.py"):
        for file in sorted({*room.parent.rglob("*.py")} - {room}):
            place = str(file.relative_to(root))
            for node in ast.walk(ast.parse(file.read_text())):
                match node:
                    case ast.Attribute(value=owner, attr=name):
                        pass
                    case ast.Call(
                        func=ast.Name(id="getattr" | "hasattr" | "setattr"),
                        args=[owner, ast.Constant(value=str(name)), *_],
                    ):
                        pass
                    case _:
                        continue
                is_own = ast.unparse(owner) in ("self", "cls", "super()")
                is_private = name.startswith("_") and not name.startswith("__")
                if is_private and not is_own and f"{place}: {name}" not in allowed:
                    yield (
                        f"{place}:{node.lineno} uses {name}, a private member of "
                        "another object; give it a function in _keras_compat.py."
                    )


def find_foreign_tests(root: Path) -> Iterator[str]:
    """Finds tests of a package that import what is not installed with it alone."""
    manifests = find_manifests(root)
    modules = {one.module: name for name, one in manifests.items()}
    for package in manifests:
        known = {package, *needed_by(package, manifests.values())}
        for file in sorted(root.glob(f"packages/{package}/tests/**/*.py")):
            for line, name in imported(file):
                owner = modules.get(name.partition(".")[0], package)
                if owner not in known:
                    yield (
                        f"{file.relative_to(root)}:{line} imports {name}, which "
                        f"{package} does not need; tests of both belong in the "
                        f"upper package, or in integration_tests."
                    )


def find_wrong_bounds(root: Path) -> Iterator[str]:
    """Finds dependencies that do not agree with what is imported.

    The front of a sibling breaks with a major version (before 1.0: a minor one), its
    ``internal`` with a minor one, so what a package imports decides its bounds. An
    extra's siblings are not imported: a program uses their fronts.
    """
    manifests = find_manifests(root)
    for package, own in manifests.items():
        needs = {one.name: one.specifier for one in own.siblings}
        used: dict[str, set[str]] = {name: set() for name in needs}
        for _, sibling, name in from_siblings(root, package):
            used.setdefault(sibling, set()).add([*name.split("."), ""][1])
        for sibling, names in sorted(used.items()):
            version = manifests[sibling].version
            given, is_internal = needs.get(sibling), INTERNAL in names
            if given is None:
                yield f"{package} imports {sibling}; its pyproject.toml must list it."
            elif not names:
                yield (
                    f"{package} lists {sibling} in pyproject.toml, and imports it "
                    f"nowhere."
                )
            elif given != SpecifierSet(wanted := bound(given, version, is_internal)):
                yield (
                    f"{package} imports {sibling}'s "
                    f"{'internal' if is_internal else 'front alone'}, so its "
                    f'pyproject.toml must say "{sibling}{wanted}"; got "{given}".'
                )
        for need in own.optional_siblings:
            wanted = bound(need.specifier, manifests[need.name].version, False)
            if need.specifier != SpecifierSet(wanted):
                yield (
                    f'{package}: an extra must say "{need.name}{wanted}"; got "{need}".'
                )


def bound(given: SpecifierSet, sibling: Version, is_internal: bool) -> str:
    """Returns the range that a dependency on a sibling must have.

    Its lower end is the package's to say, which ``nox -s siblings -- compat`` proves.

    >>> bound(SpecifierSet(">=1.2.0rc1,<3"), Version("1.3.1"), is_internal=True)
    '>=1.2.0rc1,<1.4'
    """
    low = next((str(one) for one in given if one.operator == ">="), f">={sibling}")
    by_minor = is_internal or not sibling.major
    minor, major = f"{sibling.major}.{sibling.minor + 1}", f"{sibling.major + 1}"
    return f"{low},<{minor if by_minor else major}"


def find_arrows_up(root: Path) -> Iterator[str]:
    """Finds packages that need each other; ``lint-imports`` knows which is above."""
    try:
        read_manifests(root)
    except CycleError as error:
        yield f"these packages need each other: {' -> '.join(error.args[1])}."


def find_unlisted(root: Path) -> Iterator[str]:
    """Finds lists in files for all packages that are not of all packages."""
    tools, manifests = settings(root), find_manifests(root)
    names, modules = {*manifests}, {one.module for one in manifests.values()}
    linter = tools["importlinter"]
    ordered = [one["layers"] for one in linter["contracts"] if "layers" in one]
    rooms = [name for one in linter["contracts"] for name in one.get("containers", ())]
    folders = {f"$MYPY_CONFIG_FILE_DIR/packages/{name}/src" for name in names}
    paths = {one for one in tools["mypy"]["mypy_path"] if "/packages/" in one}
    local = (root / "packages" / "siblings.txt").read_text().splitlines()
    for what, got, wanted in (
        ("pyproject.toml: tool.mypy.mypy_path", paths, folders),
        (
            "pyproject.toml: tool.importlinter.root_packages",
            {*linter["root_packages"]},
            modules,
        ),
        (
            "pyproject.toml: the first contract's layers",
            {*" | ".join(ordered[0]).split(" | ")},
            modules,
        ),
        ('pyproject.toml: the contracts "Rooms of"', modules & {*rooms}, modules),
        (
            "pyproject.toml: tool.towers.budgets",
            {*tools["towers"]["budgets"]},
            names,
        ),
        (
            "packages/siblings.txt",
            {line for line in local if not line.startswith("#")},
            {f"{name} @ file://${{PWD}}/packages/{name}" for name in names},
        ),
    ):
        if got != wanted:
            yield (
                f"{what} must have {sorted(wanted - got)} too, and not "
                f"{sorted(got - wanted)}."
            )


def find_lost_paths(root: Path) -> Iterator[str]:
    """Finds files, folders and private names on design pages that are no more."""
    everywhere = ("*", "packages/*/src/**/*", "packages/*/tests/**/*", "*_tests/**/*")
    files = [one for pattern in everywhere for one in root.glob(pattern)]
    paths = {own for one in files for own in (one, one.with_suffix(""))}
    known = "".join(f"/{path.relative_to(root)}\n" for path in paths)
    names = {name for one in sources(root) for name in _WORD.findall(one.read_text())}
    for page in sorted(root.glob("docs/design/*.md")):
        for number, line in enumerate(page.read_text().splitlines(), 1):
            for found in _NAMED.findall(line):
                if f"/{found.rstrip('/')}\n" not in known and found not in names:
                    yield (
                        f"{page.relative_to(root)}:{number} names {found}, which is "
                        "neither a file or folder nor a name."
                    )


def find_strays(root: Path) -> Iterator[str]:
    """Finds what is at the top level by accident, committed or not."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    tops = {path.partition("/")[0] for path in listed.stdout.split("\0") if path}
    top = settings(root)["towers"].get("top_level", [])
    for name in sorted(tops - {*top}):
        if not name.startswith(".") and (root / name).exists():
            yield (
                f"{name} does not belong at the top level, which has {', '.join(top)}; "
                "programs of pages write into the folder where they are started."
            )


RULES: tuple[Callable[[Path], Iterator[str]], ...] = (
    find_strays,
    find_unlisted,
    find_lost_paths,
    find_heavy,
    find_crowded,
    find_circles,
    find_trespasses,
    find_private_members,
    find_foreign_tests,
    find_wrong_bounds,
    find_arrows_up,
    find_private_sections,
    find_slow,
    find_tics,
)


def main() -> int:
    """Prints all that is refused; returns 1 where something is."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    faults = [fault for rule in RULES for fault in rule(ROOT)]
    for fault in faults:
        sys.stderr.write(f"{fault}\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
