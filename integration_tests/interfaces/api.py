"""Checks or writes a package's frozen interface files.

``api.txt`` has a line per public name, ``internal.txt`` one per name of the module
``internal``, which is for siblings. They must agree with the code: a review sees by
them what a change does to users. Against the last release the change decides which
version is due. Breaking is what griffe finds between both sources. It passes over
annotations, values, replaced bases, decorators, overloads and the fields of named
tuples, so a line that goes or changes is breaking too; one that comes is an addition.
"""

import difflib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import griffe
from packaging.version import Version

from interfaces.api_lines import Faces, interface_lines, load, split
from interfaces.manifest import Manifest, find_releases, raise_all, read_manifests
from interfaces.repository import Repository

FILES = ("api.txt", "internal.txt")
"""The file of each face, in the order of ``Faces``."""


def run(root: Path, packages: Sequence[str], write: bool, version: str) -> None:
    """Runs the session; ``ValueError`` where interfaces are not as they must be."""
    if version:
        raise_all(root, Version(version))
    manifests = read_manifests(root)
    if unknown := {*packages} - manifests.keys():
        raise ValueError(
            f"got {sorted(unknown)}; wanted some of {', '.join(manifests)}."
        )
    chosen = [manifests[package] for package in packages or manifests]
    for manifest in chosen if write else ():
        write_files(root, manifest)
    if faults := [fault for manifest in chosen if (fault := check(root, manifest))]:
        raise ValueError("\n\n".join(faults))


def write_files(root: Path, manifest: Manifest) -> None:
    """Rewrites the interface files from the code; without ``internal`` there is one."""
    kinds = ("The public interface", "What siblings may use")
    for file, kind, face in zip(FILES, kinds, faces(root, manifest), strict=True):
        path = root / manifest.folder / file
        path.unlink(missing_ok=True)
        if lines := interface_lines(face):
            head = (
                f"# {kind} of {manifest.name}, one line per name. Written by\n"
                f"#   nox -s api -- {manifest.name} --write\n"
            )
            path.write_text(head + "".join(f"{line}\n" for line in lines))


def check(root: Path, manifest: Manifest) -> str:
    """Says what is wrong with a package's interface and version, or nothing.

    Where history is missing, as in an archive or a shallow clone, the files are
    compared with the code alone, and that is said.
    """
    if fault := check_files(root, manifest):
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


def check_files(root: Path, manifest: Manifest) -> str:
    """Says how the interface files and the code differ, or nothing."""
    said = []
    for file, face in zip(FILES, faces(root, manifest), strict=True):
        path = root / manifest.folder / file
        frozen = parse(path.read_text()) if path.exists() else []
        if differs := difference(frozen, interface_lines(face)):
            said += [*differs, f"{manifest.name}: {file} (-) and the code (+) differ."]
    write = f"If the code is right, run nox -s api -- {manifest.name} --write"
    return "\n".join([*said, write]) if said else ""


def check_version(root: Path, manifest: Manifest, last: Manifest) -> str:
    """Says why the version does not suit the change since ``last``, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Repository(root).export(last.commit, Path(folder) / "t", last.folder)
        pairs = zip(faces(tree, last), faces(root, manifest), strict=True)
        front, internal = [change_between(old, new) for old, new in pairs]
    sys.stdout.write(f"{manifest.name}: compared with {last}.\n")
    due = due_version(last.version, front, internal)
    if manifest.version >= due:
        return ""
    return "\n".join(
        [
            f"{manifest.name}, against its last release, {last.version}:",
            *front,
            *internal,
            f"The version must be {due} or higher; got {manifest.version}.",
        ]
    )


def faces(root: Path, manifest: Manifest) -> Faces:
    """Reads the source of a package in a tree."""
    return split(load(manifest.module, root / manifest.folder / "src"))


def parse(text: str) -> list[str]:
    """Reads the lines of a file, comments and empty ones left out."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def difference(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Lists the lines that only one side has, ``-`` or ``+`` before them."""
    compared = difflib.unified_diff(before, after, n=0, lineterm="")
    changed = [line for line in compared if line[0] in "-+"]
    return [f"{line[0]} {line[1:]}" for line in changed[2:]]  # after the head


def change_between(old: griffe.Module | None, new: griffe.Module | None) -> list[str]:
    """Compares a face of two sources: a diff of lines, then what griffe finds."""
    differs = difference(interface_lines(old), interface_lines(new))
    if not (old and new):
        return differs
    style = griffe.ExplanationStyle.MARKDOWN  # the others colour what they say
    found = griffe.find_breaking_changes(old, new)
    said = [breakage.explain(style).removeprefix("- ") for breakage in found]
    return [*differs, *(f"griffe: {line}" for line in said)]


def due_version(
    last: Version, front: Sequence[str], internal: Sequence[str] = ()
) -> Version:
    """Returns the lowest version that changes since ``last`` may have.

    What breaks the front raises the major version, what is added to it, or breaks
    ``internal``, the minor one, and the rest the patch. Before 1.0 a break of either
    raises the minor version. After a candidate any change takes the next one.
    """
    major, minor, patch = last.release
    breaks_front, breaks_internal = (
        any(not line.startswith("+") for line in change) for change in (front, internal)
    )
    if not (front or internal):
        return last
    if last.pre:
        kind, number = last.pre
        return Version(f"{last.base_version}{kind}{number + 1}")
    if breaks_front and major:
        return Version(f"{major + 1}.0.0")
    if breaks_front or breaks_internal or (front and major):
        return Version(f"{major}.{minor + 1}.0")
    return Version(f"{major}.{minor}.{patch + 1}")
