"""The releases of a package, found in history without tags.

A commit releases the version that stands in the package's pyproject.toml when the
newest section of its changelog has the same version and a date. The first commit that
says so of a version is its release; what follows, until the version changes, is work
on the next one.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from packaging.version import Version

from interfaces.manifest import Manifest, parse_manifest
from interfaces.repository import Repository

_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_DATED = re.compile(r"(\S+) \(\d{4}-\d{2}-\d{2}\)")


@dataclass(frozen=True)
class Release:
    """A released version of a package.

    Attributes:
      manifest: what the package said of itself then.
      commit: that released it.
    """

    manifest: Manifest
    commit: str

    @property
    def version(self) -> Version:
        """The released version."""
        return self.manifest.version

    def __str__(self) -> str:
        """Names the release as a person would."""
        return f"{self.manifest.name} {self.version} (commit {self.commit[:9]})"


def find_releases(repository: Repository, package: str) -> list[Release]:
    """Finds the releases of ``package`` up to HEAD, the lowest version first.

    Raises:
      RuntimeError: the clone is shallow, or there is no repository.
    """
    folder = f"packages/{package}"
    paths = (f"{folder}/pyproject.toml", f"{folder}/CHANGELOG.md")
    states = []
    for commit in repository.commits(*paths):
        pyproject, changelog = (repository.read(commit, path) for path in paths)
        states.append((commit, released_manifest(pyproject or "", changelog or "")))
    return sorted(first_of_each(states), key=lambda release: release.version)


def find_all_releases(
    repository: Repository, packages: Iterable[str]
) -> dict[str, list[Release]]:
    """Finds the releases of several packages, by name."""
    return {package: find_releases(repository, package) for package in packages}


def released_manifest(pyproject: str, changelog: str) -> Manifest | None:
    """Reads which version a state of the files releases; None for none."""
    section = _SECTION.search(changelog)
    dated = _DATED.fullmatch(section[1]) if section else None
    if not pyproject or not dated:
        return None
    manifest = parse_manifest(pyproject)
    return manifest if Version(dated[1]) == manifest.version else None


def first_of_each(states: Iterable[tuple[str, Manifest | None]]) -> list[Release]:
    """Picks the commit that first released each version, from the oldest on."""
    found: dict[Version, Release] = {}
    for commit, manifest in states:
        if manifest is not None and manifest.version not in found:
            found[manifest.version] = Release(manifest, commit)
    return list(found.values())
