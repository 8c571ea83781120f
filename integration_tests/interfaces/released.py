"""Leaves the tree of the newest release of all; for the session ``released``."""

import argparse
import sys
from pathlib import Path

from interfaces.manifest import find_releases, read_manifests
from interfaces.repository import Repository


def main() -> int:
    """Writes the tree into the folder that is named; returns 1 where there is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    repository = Repository(Path.cwd())
    try:
        releases = find_releases(repository, *read_manifests(repository.root))
        commits = [release.commit for release in releases]
        newest = repository.git("rev-list", "--topo-order", "-1", *commits)
        repository.export(newest, folder)
    except RuntimeError as error:
        sys.stderr.write(f"released: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
