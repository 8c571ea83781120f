"""Plans the tests of a package's last released dependents with the package of now.

The session ``forward`` calls it. A dependent is tested by the tests of its own release,
with the newest sibling releases that go with it, and the checkout's own where none
does; one whose bounds exclude the package of now is named and left out.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from interfaces.manifest import Manifest, known, read_manifests
from interfaces.old_wheels import wheels_for
from interfaces.pins import Candidate, pick
from interfaces.planned_runs import PlannedRun, run_planner
from interfaces.released import Release, find_all_releases
from interfaces.repository import Repository


def main() -> int:
    """Runs the command; returns 1 where history cannot be read."""
    return run_planner("forward", __doc__, plan)


def plan(root: Path, package: str, *, dist: Path, into: Path) -> list[PlannedRun]:
    """Finds the dependents, builds what they need and says what was found."""
    manifests = read_manifests(root)
    known(manifests, package)
    repository = Repository(root)
    releases = find_all_releases(repository, manifests)
    dependents = last_dependents(package, releases)
    if not dependents:
        sys.stdout.write(f"{package}: no released package needs it.\n")
    runs = []
    for dependent in dependents:
        picks = newest_with(package, dependent, manifests, releases)
        sys.stdout.write(describe(manifests[package], dependent, picks))
        if picks is None:
            continue
        folder = into / dependent.manifest.name
        folder.mkdir()
        wheels = wheels_for(picks, repository, dist=dist, into=folder)
        tree = repository.export(dependent.commit, folder / "tree")
        name = dependent.manifest.name
        runs.append(PlannedRun(name, str(tree), tuple(map(str, wheels))))
    return runs


def last_dependents(
    package: str, releases: Mapping[str, Sequence[Release]]
) -> list[Release]:
    """Finds the last releases that need ``package``, directly or through others."""
    last = {name: found[-1] for name, found in releases.items() if found}

    def reaches(name: str) -> bool:
        needs = last[name].manifest.needs if name in last else {}
        return package in needs or any(reaches(need) for need in needs)

    return [release for name, release in last.items() if reaches(name)]


def newest_with(
    package: str,
    dependent: Release,
    manifests: Mapping[str, Manifest],
    releases: Mapping[str, Sequence[Release]],
) -> list[Candidate] | None:
    """Picks the newest releases that go with both; None where nothing does.

    Returns:
      ``package`` of the checkout, the dependent and its siblings; of these a checkout's
      own only where no release fits.
    """
    candidates = {
        name: [
            *map(Candidate.released, reversed(releases.get(name, ()))),
            Candidate(manifest),
        ]
        for name, manifest in manifests.items()
    }
    fixed = [Candidate(manifests[package]), Candidate.released(dependent)]
    picks = pick(fixed, candidates)
    return None if picks is None else list(picks.values())


def describe(
    current: Manifest, dependent: Release, picks: Sequence[Candidate] | None
) -> str:
    """Says with what a dependent is tested, or why it is not."""
    if picks is None:
        return (
            f"{dependent}: no set of releases goes with it and {current.name} "
            f"{current.version}; nothing to prove.\n"
        )
    others = [one for one in picks if one.manifest.name != dependent.manifest.name]
    return f"{dependent} is tested with {', '.join(map(str, others))}.\n"


if __name__ == "__main__":
    sys.exit(main())
