"""Checks or writes a package's frozen interface file.

The file, a line per public name, must agree with the code: a review sees by it what a
change does to users. Against the last release the change decides which version is due.
Breaking is what griffe finds between both sources. It passes over annotations, values,
replaced bases, decorators, overloads and the fields of named tuples, so a line that
goes or changes is breaking too; one that comes is an addition.
"""

import difflib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import griffe
from packaging.version import Version

from interfaces.api_lines import interface_lines, load
from interfaces.manifest import Manifest, find_releases, read_manifests
from interfaces.repository import Repository

FILE = "api.txt"


def run(root: Path, package: str, write: bool) -> None:
    """Runs the session; ``ValueError`` where the interface is not as it must be."""
    manifests = read_manifests(root)
    if package not in manifests:
        raise ValueError(f"got {package!r}; wanted one of {', '.join(manifests)}.")
    if write:
        write_file(root, manifests[package])
    if fault := check(root, manifests[package]):
        raise ValueError(fault)


def write_file(root: Path, manifest: Manifest) -> None:
    """Rewrites the interface file from the code."""
    head = (
        f"# The public interface of {manifest.name}, one line per name. Written by\n"
        f'#   nox -s "api({manifest.name})" -- --write\n'
    )
    lines = "".join(f"{line}\n" for line in interface_lines(source(root, manifest)))
    (root / manifest.folder / FILE).write_text(head + lines)


def check(root: Path, manifest: Manifest) -> str:
    """Says what is wrong with a package's interface and version, or nothing.

    Where history is missing, as in an archive or a shallow clone, the file is compared
    with the code alone, and that is said.
    """
    if fault := check_file(root, manifest):
        return fault
    try:
        releases = find_releases(Repository(root), manifest.name)
    except RuntimeError as lack:
        sys.stdout.write(f"{manifest.name}: NOT compared with a release: {lack}\n")
        return ""
    if not releases:
        sys.stdout.write(f"{manifest.name}: no earlier release to compare with.\n")
        return ""
    return check_version(root, manifest, releases[-1])


def check_file(root: Path, manifest: Manifest) -> str:
    """Says how the interface file and the code differ, or nothing."""
    file = root / manifest.folder / FILE
    frozen = parse(file.read_text()) if file.exists() else []
    differs = difference(frozen, interface_lines(source(root, manifest)))
    said = (
        f"{manifest.name}: {FILE} (-) and the code (+) differ; if the code is right, "
        f'run nox -s "api({manifest.name})" -- --write'
    )
    return "\n".join([*differs, said]) if differs else ""


def check_version(root: Path, manifest: Manifest, last: Manifest) -> str:
    """Says why the version does not suit the change since ``last``, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Repository(root).export(last.commit, Path(folder) / "t", last.folder)
        change = change_between(source(tree, last), source(root, manifest))
    sys.stdout.write(f"{manifest.name}: compared with {last}.\n")
    due = due_version(last.version, change)
    if manifest.version >= due:
        return ""
    return "\n".join(
        [
            f"{manifest.name}, against its last release, {last.version}:",
            *change,
            f"The version must be {due} or higher; got {manifest.version}.",
        ]
    )


def source(root: Path, manifest: Manifest) -> Any:
    """Reads the source of a package in a tree."""
    return load(manifest.module, root / manifest.folder / "src")


def parse(text: str) -> list[str]:
    """Reads the lines of a file, comments and empty ones left out."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def difference(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Lists the lines that only one side has, ``-`` or ``+`` before them."""
    compared = difflib.unified_diff(before, after, n=0, lineterm="")
    changed = [line for line in compared if line[0] in "-+"]
    return [f"{line[0]} {line[1:]}" for line in changed[2:]]  # after the head


def change_between(old: Any, new: Any) -> list[str]:
    """Compares two sources: a diff of their lines, then what griffe calls breaking."""
    style = griffe.ExplanationStyle.MARKDOWN  # the others colour what they say
    found = griffe.find_breaking_changes(old, new)
    said = [breakage.explain(style).removeprefix("- ") for breakage in found]
    differs = difference(interface_lines(old), interface_lines(new))
    return [*differs, *(f"griffe: {line}" for line in said)]


def due_version(last: Version, change: Sequence[str]) -> Version:
    """Returns the lowest version that a change since ``last`` may have.

    Before 1.0 what breaks raises the minor version, from 1.0 on the major one; an
    addition raises the patch version. After a candidate any change takes the next one.
    """
    major, minor, patch = last.release
    if not change:
        return last
    if last.pre:
        kind, number = last.pre
        return Version(f"{last.base_version}{kind}{number + 1}")
    if all(line.startswith("+") for line in change):
        return Version(f"{major}.{minor}.{patch + 1}")
    return Version(f"{major + 1}.0.0" if major else f"0.{minor + 1}.0")
