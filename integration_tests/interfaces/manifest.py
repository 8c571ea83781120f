"""A package of the checkout, or a release of it, as its pyproject.toml says.

A release is a section of the changelog that has a date. Its commit is the one that the
tag ``tw-core-v0.1.0`` names, and in a clone without that tag the first one that has the
section.
"""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from interfaces.repository import Repository

PREFIX = "tw-"
SECTION = re.compile(r"^## (\S+) \((\d{4}-\d{2}-\d{2})\)$", re.MULTILINE)

_VERSION = re.compile(r'^version = ".*"$', re.MULTILINE)
_BOUND = re.compile(r"(tw-[\w\[\],-]+)>=[^,<]+,<([\d.]+)")


@dataclass(frozen=True)
class Manifest:
    """A package at one point in history; ``needs`` names siblings and others."""

    name: str
    version: Version
    needs: frozenset[Requirement] = frozenset()
    commit: str = ""  # that released it; of the checkout, none
    extras: frozenset[Requirement] = frozenset()  # of all extras together

    @property
    def module(self) -> str:
        """The module that is imported, as in ``tw_core``."""
        return self.name.replace("-", "_")

    @property
    def folder(self) -> str:
        """Where the package lies in a tree."""
        return f"packages/{self.name}"

    @property
    def tag(self) -> str:
        """The tag of its release, as in ``tw-core-v0.1.0``."""
        return f"{self.name}-v{self.version}"

    @property
    def siblings(self) -> list[Requirement]:
        """The packages of this repository among its needs."""
        return [need for need in self.needs if need.name.startswith(PREFIX)]

    @property
    def optional_siblings(self) -> list[Requirement]:
        """The packages of this repository among its extras."""
        return [need for need in self.extras if need.name.startswith(PREFIX)]

    def __str__(self) -> str:
        """Names the version and where it comes from."""
        source = f"commit {self.commit[:9]}" if self.commit else "the checkout"
        return f"{self.name} {self.version} ({source})"


def parse_manifest(text: str, commit: str = "") -> Manifest:
    """Reads the text of a package's pyproject.toml."""
    project = tomllib.loads(text)["project"]
    needs = frozenset(map(Requirement, project.get("dependencies", ())))
    optional = project.get("optional-dependencies", {}).values()
    extras = frozenset(Requirement(line) for lines in optional for line in lines)
    version = Version(project["version"])
    return Manifest(project["name"], version, needs, commit, extras)


def find_manifests(root: Path) -> dict[str, Manifest]:
    """Reads the packages of a checkout, by name."""
    paths = sorted(root.glob("packages/*/pyproject.toml"))
    return {path.parent.name: parse_manifest(path.read_text()) for path in paths}


def read_manifests(root: Path) -> dict[str, Manifest]:
    """Reads the packages of a checkout; by name, each after all those that it needs.

    Those of its extras are before it too.
    """
    found = find_manifests(root)
    needs = {
        name: sorted(need.name for need in (*one.siblings, *one.optional_siblings))
        for name, one in found.items()
    }
    ordered = TopologicalSorter(needs).static_order()
    return {name: found[name] for name in ordered if name in found}


def needed_by(name: str, states: Iterable[Manifest]) -> set[str]:
    """Lists the siblings that a package needs, by others too, in any of ``states``."""
    states, names = list(states), {name}
    while (
        more := {
            need.name for one in states if one.name in names for need in one.siblings
        }
        - names
    ):
        names |= more
    return names - {name}


def raise_all(root: Path, version: Version) -> None:
    """Writes one version into all packages, which then require each other from it on.

    How far a bound goes, to the next minor or major version, stays.
    """

    def bound(found: re.Match[str]) -> str:
        high = f"{version.major}.{version.minor + 1}"
        high = high if "." in found[2] else f"{version.major + 1}"
        return f"{found[1]}>={version},<{high}"

    said = f"All packages have version {version}, and require each other from it on.\n"
    for one in find_manifests(root).values():
        path = root / one.folder / "pyproject.toml"
        text = _VERSION.sub(f'version = "{version}"', path.read_text(), count=1)
        path.write_text(_BOUND.sub(bound, text))
        (root / one.folder / "changelog.d" / "+all.changed.md").write_text(said)


def find_releases(repository: Repository, *packages: str) -> list[Manifest]:
    """Finds the releases up to HEAD: of each package, the lowest version first.

    ``RuntimeError`` where a tag is missing in a shallow clone, or the repository is.
    """
    releases = []
    for name in packages:
        changelog = repository.root / "packages" / name / "CHANGELOG.md"
        dated = [
            Version(version) for version, _ in SECTION.findall(changelog.read_text())
        ]
        for version in sorted(dated):
            commit = _commit_of(repository, name, version)
            text = repository.git("show", f"{commit}:packages/{name}/pyproject.toml")
            releases.append(parse_manifest(text, commit))
    return releases


def _commit_of(repository: Repository, name: str, version: Version) -> str:
    if repository.git("tag", "--list", f"{name}-v{version}"):
        return repository.git("rev-parse", f"{name}-v{version}^{{commit}}")
    if repository.git("rev-parse", "--is-shallow-repository") == "true":
        raise RuntimeError(
            f"{repository.root}: this clone is shallow, so that the commits of earlier "
            f"releases are missing; fetch them with git fetch --unshallow, or their "
            f"tags with git fetch --tags."
        )
    section = rf"^## {re.escape(str(version))} \([0-9]"
    file = f"packages/{name}/CHANGELOG.md"
    order = ("--topo-order", "--reverse", "--format=%H", "--extended-regexp")
    return repository.git("log", *order, f"-G{section}", "HEAD", "--", file).split()[0]
