"""Plants bugs in copies of the packages, and counts those that the tests find.

Run by ``nox -s planted``: proof that merged or shortened tests lose nothing. The faults
are in ``planted.toml``. Each is planted alone; its tests run with ``-x``, as they run
by day, and must fail. Where a case of ``full`` must find it, that case runs instead.
A fault whose line is gone is reported, and needs a new line by hand.
"""

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness.processes import Program

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_suffix(".toml")
AT_ONCE = 2
"""How many faults are planted at a time, each in a copy of its own."""
DEADLINE_S = 900
"""How long one fault's tests may take; a fault that makes them hang is found."""

_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_NO_TESTS_RAN = 5  # pytest's exit status


@dataclass(frozen=True)
class Fault:
    """A line of source, and what a slip would make of it."""

    name: str  # a sentence
    file: str  # the source file, below ``packages``
    find: str  # occurs once in the file
    replace: str  # takes its place
    tests: tuple[str, ...]  # files and folders below ``packages`` that must find it
    full: str = ""  # the case that does, where none by day can

    def planted_in(self, text: str) -> str | None:
        """Returns a source with the fault; None if it has no single place there."""
        if text.count(self.find) != 1:
            return None
        return text.replace(self.find, self.replace)


def read_faults(path: Path = LIST) -> list[Fault]:
    """Reads the list."""
    return [
        Fault(file=one.pop("in"), tests=tuple(one.pop("tests")), **one)
        for one in tomllib.loads(path.read_text("utf-8"))["fault"]
    ]


def copy_tree(to: Path) -> None:
    """Copies the files that git knows, with their changes."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def has_place(fault: Fault, tree: Path = ROOT) -> bool:
    """Returns whether a fault can be planted in a tree as it is."""
    path = tree / "packages" / fault.file
    return path.is_file() and fault.planted_in(path.read_text("utf-8")) is not None


def find(fault: Fault, tree: Path) -> str:
    """Plants a fault in a copy, and takes it out again; returns what found it."""
    path = tree / "packages" / fault.file
    text = path.read_text("utf-8")
    planted = fault.planted_in(text)
    assert planted is not None
    path.write_text(planted, "utf-8")
    try:
        return _first_failure(tree, [fault.full] if fault.full else fault.tests)
    finally:
        path.write_text(text, "utf-8")


def _first_failure(tree: Path, tests: Sequence[str]) -> str:
    # Before what is installed: the copy is what is tested, in child processes too.
    sources = [str(path) for path in sorted(tree.glob("packages/*/src"))]
    process = Program(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        + [f"packages/{test}" for test in tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sources)},
    )
    status = process.finish(DEADLINE_S)
    if status == -9:
        return "the deadline"
    if status in (0, _NO_TESTS_RAN):
        return ""
    failed = _FAILED.search(process.out)
    return failed[1].removeprefix("packages/") if failed else "no test: it crashed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Plants the faults, each alone; returns 1 if one was not found."""
    parser = argparse.ArgumentParser(prog="planted", description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="words in the faults' names or files; all by default"
    )
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    options = parser.parse_args(arguments)
    faults = [
        one
        for one in read_faults()
        if not options.names
        or any(word in f"{one.name} {one.file}" for word in options.names)
    ]
    if options.list:
        print("\n".join(f"{one.file}: {one.name}" for one in faults))
        return 0
    print("| fault | room | found by | seconds |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="planted") as folder:
        trees = queue.SimpleQueue[Path]()
        for number in range(AT_ONCE):
            trees.put(Path(folder, str(number)))
            copy_tree(Path(folder, str(number)))

        def find_in_turn(one: Fault) -> str | None:
            began, tree = time.monotonic(), trees.get()
            found = find(one, tree) if has_place(one, tree) else None
            trees.put(tree)
            by = f"`{found}`" if found else "**nothing**"
            by = "**its line is gone**" if found is None else by
            room = one.file.partition("/src/")[2]
            seconds = time.monotonic() - began
            print(f"| {one.name} | `{room}` | {by} | {seconds:.0f} |", flush=True)
            return found

        with ThreadPoolExecutor(AT_ONCE) as threads:
            found = list(threads.map(find_in_turn, faults))
    by_day = sum(
        bool(by) for one, by in zip(faults, found, strict=True) if not one.full
    )
    by_full = sum(bool(by) for by in found) - by_day
    print(f"\n{by_day} of {len(faults)} found by day, {by_full} more in full.")
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
