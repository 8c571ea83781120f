"""Tests with siblings of other releases; what ``nox -s siblings`` runs.

Wheels of releases are built from history, and uv's resolver chooses among them and
those of the checkout. It sees no index, where others may have our names, and leaves
third parties out: the session installs those of today first, and holds them.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from interfaces.manifest import (
    PREFIX,
    Manifest,
    find_releases,
    needed_by,
    read_manifests,
)
from interfaces.repository import Repository, build, run_module

DIST = "dist"
Wheels = dict[Path, Manifest]
# Tests of a package, in the tree ``root``, with all wheels that they need.
PlannedRun = dict[str, Any]
Planner = Callable[[Path, str, Path], list[PlannedRun]]


def run(planner: Planner, root: Path, package: str, into: Path) -> None:
    """Leaves ``runs.json`` for the session."""
    (into / "runs.json").write_text(json.dumps(planner(root, package, into)))


def compat(root: Path, package: str, into: Path) -> list[PlannedRun]:
    """Plans a package's tests with the oldest sibling releases that its bounds allow.

    Those of its extras must go with them, and are installed too. A sibling of which no
    release is in the bounds is taken from the checkout; there is nothing to run where
    that is so of all. ``ValueError`` where nothing goes together.
    """
    manifests = read_manifests(root)
    own = manifests[package]
    releases = find_releases(Repository(root), *manifests)
    with_extras = replace(own, needs=own.needs | {*own.optional_siblings})
    needed = needed_by(package, [with_extras, *manifests.values(), *releases])
    old = build_wheels(root, [one for one in releases if one.name in needed], into)
    current = [one for one in manifests.values() if one.name in {package, *needed}]
    wheels = built_wheels(current, root / DIST) | old
    chosen = choose(wheels, [own], own.optional_siblings, resolution="lowest")
    if old.keys() & chosen.keys():
        return [_planned(own, chosen, root)]
    why = "no earlier release of a sibling is in its bounds"
    sys.stdout.write(f"{package}: {why if needed else 'needs no sibling'}.\n")
    return []


def forward(root: Path, package: str, into: Path) -> list[PlannedRun]:
    """Plans the tests of a package's last released dependents with the package of now.

    A dependent is tested by the tests of its own release, with the newest sibling
    releases that go with it, and with the checkout's where those do not; one whose
    bounds exclude the package of now is named and left out.
    """
    manifests = read_manifests(root)
    own = manifests[package]
    others = [name for name in manifests if name != package]
    releases = find_releases(Repository(root), *others)
    last = {one.name: one for one in releases}.values()
    dependents = [one for one in last if package in needed_by(one.name, last)]
    if not dependents:
        sys.stdout.write(f"{package}: no released package needs it.\n")
        return []
    old, here = build_wheels(root, releases, into), built_wheels([own], root / DIST)
    every = built_wheels(manifests.values(), root / DIST) | old
    runs = []
    for one in dependents:
        chosen = _chosen(here | old, [own, one]) or _chosen(every, [own, one])
        if chosen:
            tree = Repository(root).export(one.commit, into / one.name)
            runs.append(_planned(one, chosen, tree))
        else:
            what = f"{own.name} {own.version}; nothing to prove"
            sys.stdout.write(f"{one}: no releases are compatible with it and {what}.\n")
    return runs


def released(root: Path, into: Path) -> None:
    """Leaves the tree of the newest release of all."""
    repository = Repository(root)
    releases = find_releases(repository, *read_manifests(root))
    commits = [release.commit for release in releases]
    newest = repository.git("rev-list", "--topo-order", "-1", *commits)
    repository.export(newest, into)


def _chosen(wheels: Mapping[Path, Manifest], pins: Sequence[Manifest]) -> Wheels:
    try:
        return choose(wheels, pins)
    except ValueError:
        return {}


def _planned(tested: Manifest, chosen: Wheels, root: Path) -> PlannedRun:
    others = [str(one) for one in chosen.values() if one != tested]
    sys.stdout.write(f"{tested} is tested with {', '.join(others)}.\n")
    wheels = [str(wheel) for wheel in chosen]
    return {"package": tested.name, "root": str(root), "wheels": wheels}


def build_wheels(root: Path, releases: Iterable[Manifest], into: Path) -> Wheels:
    """Builds the wheels of releases from the files of their commits."""
    built = list(releases)
    for one in built:
        with tempfile.TemporaryDirectory() as folder:
            tree = Repository(root).export(one.commit, Path(folder) / "tree")
            build(tree / one.folder, into, "--wheel")
    return built_wheels(built, into)


def built_wheels(manifests: Iterable[Manifest], folder: Path) -> Wheels:
    """Finds the wheels of packages; those of the checkout are the session build's."""
    return {
        next(folder.glob(f"{one.module}-{one.version}-*.whl")): one for one in manifests
    }


def choose(
    wheels: Mapping[Path, Manifest],
    pins: Sequence[Manifest],
    more: Iterable[Requirement] = (),
    resolution: str = "highest",
) -> Wheels:
    """Has uv choose wheels that go together, ``pins`` and all siblings that they need.

    ``more`` asks for further siblings. Of two wheels with the same version the later
    one counts. ``resolution``, highest or lowest, says which versions uv prefers;
    ``ValueError``, with what uv says, where nothing goes together.
    """
    by_line = {f"{one.name}=={one.version}": path for path, one in wheels.items()}
    needs = {need.name for one in wheels.values() for need in one.needs}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for wheel in by_line.values():
            shutil.copy(wheel, folder)
        wanted, left_out = folder / "wanted.txt", folder / "left_out.txt"
        pinned = (f"{one.name}=={one.version}" for one in pins)
        wanted.write_text("\n".join((*pinned, *map(str, more))))
        left_out.write_text("\n".join(n for n in needs if not n.startswith(PREFIX)))
        try:
            said = run_module(
                *("uv", "pip", "compile", "--quiet", wanted, "--excludes", left_out),
                *("--no-index", "--find-links", folder, "--resolution", resolution),
                *("--prerelease", "allow", "--no-header", "--no-annotate"),
            )
        except RuntimeError as error:
            if "No solution found" in str(error):
                raise ValueError(
                    f"no combination of versions is possible.\n{error}"
                ) from None
            raise
    return {by_line[line]: wheels[by_line[line]] for line in said.split()}
