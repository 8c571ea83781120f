"""Prints the tests that words name: ``python -m structure.users tw-reduce gallery``.

A package names its own tests and the integration tests that use it, by themselves or
through a module of this folder; another word names the integration tests with it in
their file's name.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from structure.limits import imported

ROOT = Path(__file__).parents[2]
PAGES = "test_readmes.py"  # runs what all packages show
_NAMED = re.compile(r"\b[a-z]\w*\.py\b")


def named_by(word: str, root: Path = ROOT) -> Iterator[Path]:
    """Yields folders and files of tests, relative to the root."""
    folder = root / "integration_tests"
    tests = sorted(folder.glob("test_*.py"))
    if (root / "packages" / word / "tests").is_dir():
        yield Path("packages", word, "tests")
        users = using(folder, word.replace("-", "_")) | {folder / PAGES}
        found = [path for path in tests if path in users]
    else:
        found = [path for path in tests if word in path.stem]
    yield from (path.relative_to(root) for path in found)


def using(folder: Path, module: str) -> set[Path]:
    """Returns the files below a folder that name a module, or use a file that does."""
    texts = {path: path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))}
    used = {path: set(_used(folder, path, text)) for path, text in texts.items()}
    name = re.compile(rf"\b{module.replace('_', '[-_]')}\b")
    found = {path for path, text in texts.items() if name.search(text)}
    while new := {path for path in texts if used[path] & found} - found:
        found |= new
    return found


def _used(folder: Path, path: Path, text: str) -> Iterator[Path]:
    """Yields the files that a file imports or names, as programs that it starts."""
    for found in _NAMED.findall(text):
        yield from path.parent.rglob(found)
    for _, module in imported(path):
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            yield folder.joinpath(*parts[:count]).with_suffix(".py")


def main() -> int:
    """Prints a path a line; fails at a word that names nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="+")
    words = parser.parse_args().words
    found = {word: list(named_by(word)) for word in words}
    if lost := [word for word, paths in found.items() if not paths]:
        sys.stderr.write(f"no package and no integration test is named {lost}\n")
        return 2
    print(*dict.fromkeys(path for paths in found.values() for path in paths), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
