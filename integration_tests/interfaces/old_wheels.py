"""Wheels for a choice of candidates: released ones built from history."""

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from interfaces.pins import Candidate
from interfaces.quietly import run_quietly
from interfaces.repository import Repository


def wheels_for(
    candidates: Iterable[Candidate], repository: Repository, *, dist: Path, into: Path
) -> list[Path]:
    """Builds the wheels of releases, and takes those of the checkout from ``dist``.

    Returns:
      The paths of the wheels, all in ``into``.
    """
    return [
        release_wheel(candidate, repository, into)
        if candidate.commit
        else Path(shutil.copy(built_wheel(candidate, dist), into))
        for candidate in candidates
    ]


def release_wheel(candidate: Candidate, repository: Repository, into: Path) -> Path:
    """Builds the wheel of a release from the files of its commit."""
    if not candidate.commit:
        raise ValueError(f"release_wheel: {candidate} is no release.")
    with tempfile.TemporaryDirectory() as folder:
        tree = repository.export(candidate.commit, Path(folder) / "tree")
        source = str(tree / "packages" / candidate.manifest.name)
        run_quietly("build", "--no-isolation", "--wheel", "--outdir", str(into), source)
    return built_wheel(candidate, into)


def built_wheel(candidate: Candidate, folder: Path) -> Path:
    """Finds the wheel of a candidate.

    Raises:
      RuntimeError: there is none.
    """
    manifest = candidate.manifest
    found = sorted(folder.glob(f"{manifest.module}-{manifest.version}-*.whl"))
    if len(found) != 1:
        raise RuntimeError(
            f"{folder} must hold one wheel of {candidate}; got {found}. "
            f"The session build leaves those of the checkout in dist/."
        )
    return found[0]
