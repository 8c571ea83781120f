"""What a package's pyproject.toml says of it: name, version, needed siblings."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

_PREFIX = "tw-"
_VERSION_LINE = re.compile(r'^version = "([^"]+)"$', re.MULTILINE)


@dataclass(frozen=True)
class Manifest:
    """A package at one point in history.

    Attributes:
      name: as in ``tw-core``.
      version: the one that stands in the file.
      needs: which versions of which siblings it can use.
    """

    name: str
    version: Version
    needs: Mapping[str, SpecifierSet]

    @property
    def module(self) -> str:
        """The module that is imported, as in ``tw_core``."""
        return self.name.replace("-", "_")


def parse_manifest(text: str) -> Manifest:
    """Reads the text of a package's pyproject.toml."""
    project = tomllib.loads(text)["project"]
    needs = [Requirement(line) for line in project.get("dependencies", ())]
    return Manifest(
        name=project["name"],
        version=Version(project["version"]),
        needs={
            need.name: need.specifier for need in needs if need.name.startswith(_PREFIX)
        },
    )


def read_manifests(root: Path) -> dict[str, Manifest]:
    """Reads the packages of a checkout.

    Returns:
      By name, a package after all those that it needs.
    """
    paths = sorted(root.glob("packages/*/pyproject.toml"))
    found = {path.parent.name: parse_manifest(path.read_text()) for path in paths}
    return {name: found[name] for name in _needed_first(found)}


def known(manifests: Mapping[str, Manifest], name: str) -> Manifest:
    """Finds a package by name.

    Raises:
      ValueError: there is no such package.
    """
    if name not in manifests:
        raise ValueError(
            f"there is no package {name!r}; it must be one of {', '.join(manifests)}."
        )
    return manifests[name]


def with_version(text: str, version: Version) -> str:
    """Writes another version into the text of a pyproject.toml.

    Raises:
      ValueError: the text has no line for the version, or several.
    """
    found = len(_VERSION_LINE.findall(text))
    if found != 1:
        raise ValueError(
            f"pyproject.toml must set the version on one line; got {found} such lines."
        )
    return _VERSION_LINE.sub(f'version = "{version}"', text)


def _needed_first(manifests: Mapping[str, Manifest]) -> list[str]:
    ordered: list[str] = []
    while len(ordered) < len(manifests):
        ready = [
            name
            for name, manifest in manifests.items()
            if name not in ordered
            and all(need in ordered for need in manifest.needs if need in manifests)
        ]
        if not ready:
            rest = sorted(set(manifests) - set(ordered))
            raise ValueError(f"packages need each other in a circle: {rest}.")
        ordered += ready
    return ordered
