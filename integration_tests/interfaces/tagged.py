"""Checks a release by its tag, and builds what is published of it; session ``tagged``.

The session ``release`` makes the tag, where its maker works. What is published is built
once more where the tag arrives, from nothing but the tagged commit: the workflow
``release.yml`` runs this, and uploads the archives that it leaves.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from interfaces.api import check_file
from interfaces.manifest import Manifest, find_releases, read_manifests
from interfaces.release import ARCHIVES, prepare_archives
from interfaces.repository import Repository


def main() -> int:
    """Builds the archives; returns 1 where the tag and the files do not agree."""
    parser = argparse.ArgumentParser(prog="tagged", usage="tagged -- TAG")
    parser.add_argument("tag", help="of a release, as tw-core-v0.2.0")
    try:
        folder = build_tagged(Path.cwd(), parser.parse_args().tag)
    except (RuntimeError, ValueError) as error:
        sys.stderr.write(f"tagged: {error}\nNothing was built.\n")
        return 1
    sys.stdout.write(
        f"{folder}: {', '.join(sorted(p.name for p in folder.iterdir()))}\n"
    )
    return 0


def build_tagged(root: Path, tag: str) -> Path:
    """Builds the sdist and wheel of the release that ``tag`` names.

    Returns:
      The folder with these two, and nothing else.

    Raises:
      ValueError: tag, version, changelog and interface do not agree.
      RuntimeError: a tool fails; or two builds differ.
    """
    repository = Repository(root)
    target = check_tag(repository, tag)
    folder = root / ARCHIVES / target.name
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        prepare_archives(repository, target, Path(name))
        shutil.copytree(Path(name) / "archives" / target.name, folder)
    return folder


def check_tag(repository: Repository, tag: str) -> Manifest:
    """Returns the package that ``tag`` releases, where everything says the same.

    Raises:
      ValueError: what does not, all of it.
    """
    manifests = read_manifests(repository.root)
    name = tag.rpartition("-v")[0]
    if name not in manifests:
        raise ValueError(
            f"got the tag {tag!r}; wanted one such as "
            f"{' or '.join(one.tag for one in manifests.values())}."
        )
    target = manifests[name]
    if faults := _find_faults(repository, target, tag):
        raise ValueError("\n".join(f"{tag}: {fault}" for fault in faults))
    return target


def _find_faults(repository: Repository, target: Manifest, tag: str) -> list[str]:
    folder = repository.root / target.folder
    faults = []
    if target.tag != tag:
        faults.append(f"pyproject.toml says {target.version}.")
    if not repository.git("tag", "--list", tag):
        return [*faults, "there is no such tag."]
    head, named = repository.git("rev-parse", "HEAD", f"{tag}^{{commit}}").split()
    if head != named:
        faults.append(f"it names {named[:9]}; checked out is {head[:9]}.")
    dated = [str(one.version) for one in find_releases(repository, target.name)]
    if str(target.version) not in dated:
        listed = ", ".join(dated) or "none"
        faults.append(
            f"CHANGELOG.md has no dated section for {target.version}, only for "
            f"{listed}."
        )
    left = [p.name for p in folder.glob("changelog.d/*.md") if p.name != "README.md"]
    if left:
        faults.append(f"changelog.d holds {sorted(left)}, which no release has.")
    if fault := check_file(repository.root, target):
        faults.append(fault)
    return faults


if __name__ == "__main__":
    sys.exit(main())
