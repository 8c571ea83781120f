"""Which releases go together: a search with steps back, as siblings bound each other.

Taking the oldest release of each sibling that one package's bounds allow is not
enough: an old release may itself refuse the sibling's that was taken. So a choice that
leaves nothing for another sibling is given up for the next one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from interfaces.manifest import Manifest
from interfaces.released import Release


@dataclass(frozen=True)
class Candidate:
    """One version of a package that could be installed.

    Attributes:
      manifest: its name, version and bounds.
      commit: the release that it is built from; None for the checkout's own.
    """

    manifest: Manifest
    commit: str | None = None

    @classmethod
    def released(cls, release: Release) -> Self:
        """Makes a candidate of a release."""
        return cls(release.manifest, release.commit)

    def __str__(self) -> str:
        """Names the version and where it comes from."""
        source = f"commit {self.commit[:9]}" if self.commit else "the checkout"
        return f"{self.manifest.name} {self.manifest.version} ({source})"


Picks = Mapping[str, Candidate]


def pick(
    fixed: Sequence[Candidate], candidates: Mapping[str, Sequence[Candidate]]
) -> dict[str, Candidate] | None:
    """Chooses one candidate for everything that ``fixed`` needs, directly or not.

    Args:
      fixed: what is installed in any case; packages of different names.
      candidates: by name, in the order in which to try them.

    Returns:
      By name, ``fixed`` included, in the order of choice: of all sets that go together
      the first, when earlier names and earlier candidates come first. None where no
      set goes together.
    """
    chosen = {candidate.manifest.name: candidate for candidate in fixed}
    if not all(_agrees(candidate, chosen) for candidate in fixed):
        return None
    return _complete(chosen, candidates)


def allowed(candidates: Sequence[Candidate], bound: SpecifierSet) -> list[Candidate]:
    """Keeps the candidates that one bound admits."""
    return [one for one in candidates if admits(bound, one.manifest.version)]


def admits(bound: SpecifierSet, version: Version) -> bool:
    """Tells whether a bound admits a version, pre-releases included."""
    return bound.contains(version, prereleases=True)


def _complete(
    chosen: dict[str, Candidate], candidates: Mapping[str, Sequence[Candidate]]
) -> dict[str, Candidate] | None:
    wanted = [need for one in chosen.values() for need in one.manifest.needs]
    open_names = [name for name in wanted if name not in chosen]
    if not open_names:
        return chosen
    name = open_names[0]
    for candidate in candidates.get(name, ()):
        if _agrees(candidate, chosen):
            complete = _complete({**chosen, name: candidate}, candidates)
            if complete is not None:
                return complete
    return None


def _agrees(candidate: Candidate, chosen: Picks) -> bool:
    """Tells whether a candidate and all those chosen admit each other."""
    return all(
        _admits(candidate, other) and _admits(other, candidate)
        for other in chosen.values()
    )


def _admits(one: Candidate, other: Candidate) -> bool:
    bound = one.manifest.needs.get(other.manifest.name)
    return bound is None or admits(bound, other.manifest.version)
