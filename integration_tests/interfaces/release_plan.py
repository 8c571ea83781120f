"""Plans a release and refuses it before anything is changed; a step of ``release``."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from packaging.version import Version

from interfaces import api
from interfaces.manifest import Manifest, read_manifests
from interfaces.release_targets import (
    Target,
    chosen_packages,
    installable_with,
    target_version,
)
from interfaces.released import find_all_releases
from interfaces.repository import Repository

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True)
class ReleasePlan:
    """What is released from where.

    Attributes:
      head: the commit that is checked and released.
      epoch: the time of the release, in seconds since 1970: of its commits and of all
        files in its archives.
      targets: a package after all those that it needs.
    """

    head: str
    epoch: int
    targets: tuple[Target, ...]

    def to_json(self) -> str:
        """Writes the plan for the step that follows it."""
        targets = [
            {"package": target.package, "version": str(target.version)}
            for target in self.targets
        ]
        return json.dumps({"head": self.head, "epoch": self.epoch, "targets": targets})

    @classmethod
    def from_json(cls, text: str) -> "ReleasePlan":
        """Reads a plan."""
        data: dict[str, Any] = json.loads(text)
        targets = [Target(t["package"], Version(t["version"])) for t in data["targets"]]
        return cls(data["head"], data["epoch"], tuple(targets))


def main() -> int:
    """Writes a plan; returns 1 where something stands against it."""
    parser = argparse.ArgumentParser(
        prog="release", usage="release -- PACKAGE [PACKAGE ...] PART"
    )
    parser.add_argument("packages", nargs="+", help="names of packages, or all")
    parser.add_argument("part", help="patch, minor, major, or first")
    parser.add_argument("--to", type=Path, required=True, help="file for the plan")
    options = parser.parse_args()
    try:
        made = plan(Path.cwd(), options.packages, options.part)
    except (RuntimeError, ValueError) as error:
        sys.stderr.write(f"release: {error}\n")
        return 1
    options.to.write_text(made.to_json())
    sys.stdout.write(f"To release: {', '.join(t.tag for t in made.targets)}.\n")
    return 0


def plan(root: Path, words: Sequence[str], part: str) -> ReleasePlan:
    """Decides the versions and checks all that can be checked without building.

    Raises:
      ValueError: what stands against the release, all of it.
      RuntimeError: git cannot answer.
    """
    repository = Repository(root)
    check_clean(repository)
    manifests = read_manifests(root)
    names = chosen_packages(words, manifests)
    releases = find_all_releases(repository, manifests)
    last = {name: found[-1].version for name, found in releases.items() if found}
    targets = _each(
        names,
        lambda name: Target(
            name, target_version(last.get(name), manifests[name].version, part)
        ),
    )
    _each(names, lambda name: check_fragments(root, name))
    _each(targets, lambda target: check_tag(repository, target))
    _each(targets, lambda one: installable_with(one, targets, manifests, releases))
    _each(targets, lambda one: check_interface(root, manifests[one.package], one))
    head = repository.git("rev-parse", "HEAD")
    return ReleasePlan(head, int(time.time()), tuple(targets))


def check_clean(repository: Repository) -> None:
    """Refuses a working tree with changes, new files included."""
    changes = repository.changes()
    if changes:
        listed = "\n  ".join(changes[:20])
        raise ValueError(
            f"the working tree must be clean; got {len(changes)} changes:\n  {listed}\n"
            f"Commit them or put them away."
        )


def check_fragments(root: Path, package: str) -> None:
    """Refuses a release of which the changelog would say nothing."""
    folder = root / "packages" / package / "changelog.d"
    if not [path for path in folder.glob("*.md") if path.name != "README.md"]:
        raise ValueError(
            f"{folder.relative_to(root)} holds nothing; say there what changed, as in "
            f"+name.added.md."
        )


def check_tag(repository: Repository, target: Target) -> None:
    """Refuses a tag that is there already."""
    if repository.git("tag", "--list", target.tag):
        raise ValueError(f"the tag {target.tag} exists; a release is made once.")


def check_interface(root: Path, manifest: Manifest, target: Target) -> None:
    """Refuses an interface that the version does not allow."""
    if fault := api.check_file(root, manifest):
        raise ValueError(fault)
    fault, part = api.check_version(root, manifest, target.version)
    if fault:
        raise ValueError(f"{fault} Use the part {part}.")


def _each(items: Sequence[_T], check: Callable[[_T], _R]) -> list[_R]:
    """Applies a check to all items, and raises the faults of all of them at once."""
    results, faults = [], []
    for item in items:
        try:
            results.append(check(item))
        except ValueError as fault:
            faults.append(f"{getattr(item, 'package', item)}: {fault}")
    if faults:
        raise ValueError("\n".join(faults))
    return results


if __name__ == "__main__":
    sys.exit(main())
