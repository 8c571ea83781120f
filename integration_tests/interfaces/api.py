"""Checks or writes a package's frozen interface file; the session ``api``.

The file, a line per public name, must agree with the code: a review sees by it what a
change does to users. Against the last release the change decides which version is due.
Breaking is what griffe finds between both sources. It passes over annotations, values,
replaced bases, decorators, overloads and the fields of named tuples, so a line that
goes or changes is breaking too; one that comes is an addition.
"""

import argparse
import difflib
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import griffe
from packaging.version import Version

from interfaces.api_lines import interface_lines, load
from interfaces.manifest import Manifest, find_releases, read_manifests
from interfaces.repository import Repository

FILE = "api.txt"
PARTS = ("patch", "minor", "major")


def main() -> int:
    """Runs the session; returns 1 where the interface is not as it must be."""
    parser = argparse.ArgumentParser(prog="api", description=__doc__)
    parser.add_argument("package")
    parser.add_argument("--write", action="store_true", help="rewrite the file")
    options = parser.parse_args()
    root = Path.cwd()
    try:
        manifest = read_manifests(root)[options.package]
        if options.write:
            write(root, manifest)
        fault = check(root, manifest)
    except (RuntimeError, ValueError) as error:
        fault = f"{options.package}: {error}"
    sys.stderr.write(fault and f"{fault}\n")
    return 1 if fault else 0


def write(root: Path, manifest: Manifest) -> None:
    """Rewrites the interface file from the code."""
    head = (
        f"# The public interface of {manifest.name}, one line per name. Written by\n"
        f'#   nox -s "api({manifest.name})" -- --write\n'
    )
    lines = "".join(f"{line}\n" for line in interface_lines(package(root, manifest)))
    (root / manifest.folder / FILE).write_text(head + lines)


def parse(text: str) -> list[str]:
    """Reads the lines of a file, comments and empty ones left out."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def difference(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Lists the lines that only one side has, ``-`` or ``+`` before them."""
    compared = difflib.unified_diff(before, after, n=0, lineterm="")
    changed = [line for line in compared if line[0] in "-+"]
    return [f"{line[0]} {line[1:]}" for line in changed[2:]]  # after the head


def check(root: Path, manifest: Manifest) -> str:
    """Says what is wrong with a package's interface and version, or nothing.

    Where history is missing, as in an archive or a shallow clone, the file is compared
    with the code alone, and that is said.
    """
    fault = check_file(root, manifest)
    if fault:
        return fault
    try:
        releases = find_releases(Repository(root), manifest.name)
    except RuntimeError as lack:
        sys.stdout.write(f"{manifest.name}: NOT compared with a release: {lack}\n")
        return ""
    return check_version(root, manifest, manifest.version, releases)


def check_file(root: Path, manifest: Manifest) -> str:
    """Says how the interface file and the code differ, or nothing."""
    file = root / manifest.folder / FILE
    frozen = parse(file.read_text()) if file.exists() else []
    differs = difference(frozen, interface_lines(package(root, manifest)))
    said = (
        f"{manifest.name}: {FILE} (-) and the code (+) differ; if the code is right, "
        f'run nox -s "api({manifest.name})" -- --write'
    )
    return "\n".join([*differs, said]) if differs else ""


def check_version(
    root: Path, manifest: Manifest, version: Version, releases: Sequence[Manifest]
) -> str:
    """Says why ``version`` does not suit the change since the last release, if so."""
    if not releases:
        sys.stdout.write(f"{manifest.name}: no earlier release to compare with.\n")
        return ""
    last = releases[-1]
    with tempfile.TemporaryDirectory() as folder:
        tree = Repository(root).export(last.commit, Path(folder) / "t", last.folder)
        change = change_between(package(tree, manifest), package(root, manifest))
    sys.stdout.write(f"{manifest.name}: compared with {last}.\n")
    fault = complaint(last.version, version, change)
    return fault and f"{manifest.name}, against its last release:\n{fault}"


def package(root: Path, manifest: Manifest) -> Any:
    """Reads the source of a package in a tree."""
    return load(manifest.module, root / manifest.folder / "src")


def change_between(old: Any, new: Any) -> list[str]:
    """Compares two sources: a diff of their lines, then what griffe calls breaking."""
    style = griffe.ExplanationStyle.MARKDOWN  # the others colour what they say
    found = griffe.find_breaking_changes(old, new)
    said = [breakage.explain(style).removeprefix("- ") for breakage in found]
    differs = difference(interface_lines(old), interface_lines(new))
    return [*differs, *(f"griffe: {line}" for line in said)]


def due_part(last: Version, change: Iterable[str]) -> str:
    """Returns the part of ``last`` that a change raises at least; empty for none.

    Before 1.0 what breaks raises the minor version, from 1.0 on the major one; an
    addition raises the patch version.
    """
    signs = {line[0] for line in change}
    if signs <= {"+"}:
        return "patch" if signs else ""
    return "major" if last.major else "minor"


def bump(version: Version, part: str) -> Version:
    """Raises one part of a version and clears those behind it."""
    major, minor, patch = version.release[:3]
    raised = {
        "patch": (major, minor, patch + 1),
        "minor": (major, minor + 1, 0),
        "major": (major + 1, 0, 0),
    }
    return Version(".".join(map(str, raised[part])))


def complaint(last: Version, now: Version, change: Sequence[str]) -> str:
    """Says what is wrong with the version ``now``, or nothing where it will do."""
    if now < last:
        return f"the version is {now}, which is below the last release, {last}."
    part = due_part(last, change)
    if not part or now >= bump(last, part):
        return ""
    what = "adds to" if part == "patch" else "changes or removes"
    said = (
        f"This {what} what {last} promised, so that the version must be "
        f"{bump(last, part)} (part {part}) or higher; got {now}."
    )
    return "\n".join([*change, said])


if __name__ == "__main__":
    sys.exit(main())
