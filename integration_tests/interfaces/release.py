"""What stands against a release; where nothing does, the session makes it."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.version import Version

from interfaces.api import check
from interfaces.manifest import Manifest, find_releases, raise_all, read_manifests
from interfaces.repository import Repository

ALL = "all"


def run(root: Path, packages: Sequence[str]) -> None:
    """Prints name and version of the packages to release, each after all it needs.

    A version behind ``all`` is written into them first, and stays if nothing stands
    against the release. ``ValueError`` is what does, of every package.
    """
    repository = Repository(root)
    if changes := repository.git("status", "--porcelain"):
        raise ValueError(f"the working tree must be clean; got the changes\n{changes}")
    if packages[0] != ALL or not packages[1:]:
        find_targets(repository, packages)
        return
    try:
        raise_all(root, Version(" ".join(packages[1:])))
        find_targets(repository, [ALL])
    except ValueError:  # back to the clean tree
        repository.git("restore", "packages")
        repository.git("clean", "--force", "--quiet", "packages")
        raise


def find_targets(repository: Repository, packages: Sequence[str]) -> None:
    """Prints what can be released; ``ValueError`` as ``run``."""
    manifests = read_manifests(repository.root)
    if unknown := {*packages} - {*manifests, ALL}:
        raise ValueError(
            f"the packages {sorted(unknown)} are unknown; wanted one or more of "
            f"{', '.join(manifests)}, or {ALL}."
        )
    targets = [one for name, one in manifests.items() if {name, ALL} & {*packages}]
    there = [*find_releases(repository, *manifests), *targets]
    faults = [
        f"{one.name}: {fault}"
        for one in targets
        for fault in find_faults(repository, one, there)
    ]
    if faults:
        raise ValueError("\n".join(faults))
    for one in targets:
        sys.stdout.write(f"release {one.name} {one.version}\n")


def find_faults(
    repository: Repository, target: Manifest, there: Sequence[Manifest]
) -> Iterator[str]:
    """Yields what stands against a release, after which ``there`` are all that are."""
    folder = repository.root / target.folder / "changelog.d"
    if {path.name for path in folder.glob("*.md")} <= {"README.md"}:
        yield "changelog.d is empty; describe the changes there."
    if any(one.tag == target.tag and one.commit for one in there):
        yield f"{target.version} is already released; raise it in pyproject.toml."
    for need in (*target.siblings, *target.optional_siblings):
        found = [one.version for one in there if one.name == need.name]
        if not any(need.specifier.contains(v, prereleases=True) for v in found):
            yield f"no release satisfies {need}; release {need.name} first, or with it."
    if fault := check(repository.root, target):
        yield fault
