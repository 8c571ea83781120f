"""Plans a package's tests with the oldest sibling releases that its bounds allow.

The session ``compat`` calls it. A sibling of which no release is in the bounds is
taken from the checkout, and where all of them are there is nothing to prove.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from interfaces.manifest import Manifest, known, read_manifests
from interfaces.old_wheels import wheels_for
from interfaces.pins import Candidate, admits, pick
from interfaces.planned_runs import PlannedRun, run_planner
from interfaces.released import Release, find_all_releases
from interfaces.repository import Repository


def main() -> int:
    """Runs the command; returns 1 where no set of siblings goes together."""
    return run_planner("compat", __doc__, plan)


def plan(root: Path, package: str, *, dist: Path, into: Path) -> list[PlannedRun]:
    """Chooses the siblings, builds their wheels and says what was chosen.

    Returns:
      One run, or none where no sibling has a release in the bounds.
    """
    manifests = read_manifests(root)
    known(manifests, package)
    repository = Repository(root)
    releases = find_all_releases(repository, manifests)
    picks = oldest(package, manifests, releases)
    sys.stdout.write(describe(package, picks))
    if not any(candidate.commit for candidate in picks):
        return []
    chosen = [Candidate(manifests[package]), *picks]
    wheels = wheels_for(chosen, repository, dist=dist, into=into)
    return [PlannedRun(package, str(root), tuple(map(str, wheels)))]


def oldest(
    package: str,
    manifests: Mapping[str, Manifest],
    releases: Mapping[str, Sequence[Release]],
) -> list[Candidate]:
    """Picks the oldest releases that ``package`` and its siblings' bounds allow.

    Returns:
      The siblings, directly needed or not; a checkout's own only where no release fits.

    Raises:
      ValueError: nothing goes together; the message shows what there was.
    """
    candidates = {
        name: [*map(Candidate.released, releases.get(name, ())), Candidate(manifest)]
        for name, manifest in manifests.items()
    }
    picks = pick([Candidate(manifests[package])], candidates)
    if picks is None:
        raise ValueError(_conflict(manifests[package], candidates))
    return [candidate for name, candidate in picks.items() if name != package]


def describe(package: str, picks: Sequence[Candidate]) -> str:
    """Says what was chosen, and what there is to prove with it."""
    if not picks:
        return f"{package}: needs no sibling; nothing to prove.\n"
    lines = [f"{package} is tested with {', '.join(map(str, picks))}."]
    if not any(candidate.commit for candidate in picks):
        lines = [f"{package}: no earlier release of a sibling is in its bounds."]
    return "".join(f"{line}\n" for line in lines)


def _conflict(manifest: Manifest, candidates: Mapping[str, Sequence[Candidate]]) -> str:
    lines = [f"no set of siblings goes together with {manifest.name}:"]
    for name, bound in manifest.needs.items():
        for one in candidates.get(name, ()):
            fits = "fits" if admits(bound, one.manifest.version) else "does not fit"
            needs = ", ".join(f"{n}{b}" for n, b in one.manifest.needs.items())
            lines.append(f"  {one} {fits} {bound}; it needs {needs or 'no sibling'}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
