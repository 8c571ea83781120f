"""Which version each package of a release gets, and what stands against it.

Only what a release may decide: all of it is pure, and all faults are told at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from packaging.version import Version

from interfaces.manifest import Manifest
from interfaces.pins import Candidate, pick
from interfaces.released import Release
from interfaces.versions import PARTS, bump

FIRST = "first"
ALL = "all"


@dataclass(frozen=True)
class Target:
    """A package that is to be released.

    Attributes:
      package: its name.
      version: that it gets.
    """

    package: str
    version: Version

    @property
    def tag(self) -> str:
        """The tag of the release, as in ``tw-core-v0.1.0``."""
        return f"{self.package}-v{self.version}"


def chosen_packages(
    words: Sequence[str], manifests: Mapping[str, Manifest]
) -> list[str]:
    """Reads the packages of a command line; ``all`` is every one.

    Returns:
      Names, a package after all those that it needs.

    Raises:
      ValueError: unknown packages, or none.
    """
    unknown = [word for word in words if word not in manifests and word != ALL]
    if unknown or not words:
        raise ValueError(
            f"got the packages {list(words)}, of which {unknown} are unknown; wanted "
            f"one or more of {', '.join(manifests)}, or {ALL}."
        )
    return [name for name in manifests if name in words or ALL in words]


def target_version(last: Version | None, standing: Version, part: str) -> Version:
    """Returns the version that a package gets.

    Args:
      last: the last released one; None for none.
      standing: the one in pyproject.toml, ``last`` or already raised.
      part: patch, minor, major or first.

    Raises:
      ValueError: the three do not go together.
    """
    if part not in (*PARTS, FIRST):
        known = ", ".join((*PARTS, FIRST))
        raise ValueError(f"got the part {part!r}; wanted one of {known}.")
    if last is None:
        if part != FIRST:
            raise ValueError(f"there is no release yet; use {FIRST} for {standing}.")
        return standing
    if part == FIRST:
        raise ValueError(f"{last} is released; use one of {', '.join(PARTS)}.")
    version = bump(last, part)
    if standing not in (last, version):
        raise ValueError(
            f"{part} makes {version} of {last}, but pyproject.toml already says "
            f"{standing}; use the part that leads there."
        )
    return version


def installable_with(
    target: Target,
    targets: Sequence[Target],
    manifests: Mapping[str, Manifest],
    releases: Mapping[str, Sequence[Release]],
) -> list[Candidate]:
    """Picks the newest siblings with which a target can be installed.

    Siblings are those of earlier releases and those that are released with it.

    Returns:
      The siblings, without the target's package.

    Raises:
      ValueError: nobody could install the release.
    """
    new = {
        one.package: Candidate(replace(manifests[one.package], version=one.version))
        for one in targets
    }
    candidates = {
        name: [
            *([new[name]] if name in new else []),
            *map(Candidate.released, reversed(releases.get(name, ()))),
        ]
        for name in manifests
    }
    picks = pick([new[target.package]], candidates)
    if picks is None:
        needs = manifests[target.package].needs.items()
        raise ValueError(
            "its bounds admit no set of released siblings: "
            + ", ".join(f"{name}{bound}" for name, bound in needs)
            + "; release those first, or with it."
        )
    return [one for name, one in picks.items() if name != target.package]
