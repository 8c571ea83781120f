"""Releases packages, whole or not at all; the session ``release``.

What can be refused at once is refused first. Then each package is committed, tagged,
built, checked and installed in a clone, and the sessions ``compat`` and ``integration``
run. One atomic push brings branch and tags back at the very end: whatever fails before
leaves the repository as it was. Nothing is published.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from packaging.version import Version

from interfaces.api import PARTS, bump, check_file, check_version
from interfaces.manifest import Manifest, find_releases, needed_by, read_manifests
from interfaces.repository import Repository, build, run, run_module
from interfaces.siblings import build_wheels, choose

ARCHIVES = Path("out") / "release"
FIRST = "first"
ALL = "all"
# Has the branch that is checked out move together with its files, if these are clean.
_RECEIVE = "git -c receive.denyCurrentBranch=updateInstead receive-pack"
_USE = """
import {module} as module
for name in module.__all__:
    getattr(module, name)
"""


def main() -> int:
    """Makes the release; returns 1 where it failed, with nothing changed."""
    usage = "release -- PACKAGE [PACKAGE ...] PART"
    parser = argparse.ArgumentParser(prog="release", usage=usage)
    parser.add_argument("--nox", required=True, help="a Python that has nox")
    parser.add_argument("packages", nargs="+", help="names of packages, or all")
    parser.add_argument("part", help="patch, minor, major, or first")
    options = parser.parse_args()
    sessions = partial(run_sessions, options.nox)
    try:
        targets = release(Path.cwd(), options.packages, options.part, sessions)
    except (RuntimeError, ValueError) as error:
        sys.stderr.write(f"release: {error}\nNothing was released.\n")
        return 1
    sys.stdout.write(f"Released {_tags(targets)}; archives lie in {ARCHIVES}/.\n")
    return 0


def run_sessions(python: str, targets: Sequence[Manifest]) -> None:
    """Runs the sessions that a release must pass; raises where one fails."""
    compats = [f"compat({target.name})" for target in targets]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-m", "nox", "-s", *compats, "integration"]
    if subprocess.run(command, env=env, check=False).returncode:
        raise RuntimeError(f"{', '.join(compats)} and integration must pass.")


def release(
    root: Path,
    words: Sequence[str],
    part: str,
    check: Callable[[Sequence[Manifest]], None],
) -> list[Manifest]:
    """Makes a release, where ``check`` does not raise; the rest is as in ``main``.

    Returns:
      The released packages, each after all those that it needs.

    Raises:
      ValueError: what stands against the release.
      RuntimeError: a tool fails.
    """
    repository = Repository(root)
    targets = plan(repository, words, part)
    sys.stdout.write(f"To release: {_tags(targets)}.\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clone = make_clone(repository, folder / "clone")
        manifests = read_manifests(root).values()
        needed = {need for one in targets for need in needed_by(one.name, manifests)}
        releases = find_releases(repository, *needed)
        wheels = build_wheels(root, releases, folder / "released")
        for target in targets:
            print(f"{target.tag}: commit, build, check, install", flush=True)
            commit(clone, target)
            archives = prepare_archives(clone, target, folder)
            wheels |= {path: target for path in archives if path.suffix == ".whl"}
            install(target, wheels)
        check(targets)
        bring_back(repository, clone, targets)
        for made in (folder / "archives").iterdir():
            shutil.copytree(made, root / ARCHIVES, dirs_exist_ok=True)
    return targets


def plan(repository: Repository, words: Sequence[str], part: str) -> list[Manifest]:
    """Decides the versions and checks all that can be checked without building.

    Raises:
      ValueError: what stands against the release, of every package.
    """
    if changes := repository.git("status", "--porcelain").splitlines():
        listed = "\n  ".join(changes[:20])
        raise ValueError(
            f"the working tree must be clean; got {len(changes)} changes:\n  {listed}\n"
            f"Commit them or put them away."
        )
    manifests = read_manifests(repository.root)
    unknown = [word for word in words if word not in manifests and word != ALL]
    if unknown:
        raise ValueError(
            f"got the packages {list(words)}, of which {unknown} are unknown; wanted "
            f"one or more of {', '.join(manifests)}, or {ALL}."
        )
    targets, faults = [], []
    for name in (one for one in manifests if one in words or ALL in words):
        try:
            targets.append(plan_package(repository, manifests[name], part))
        except ValueError as fault:
            faults.append(f"{name}: {fault}")
    if faults:
        raise ValueError("\n".join(faults))
    return targets


def plan_package(repository: Repository, standing: Manifest, part: str) -> Manifest:
    """Decides the version of one package and checks what it would release."""
    root, releases = repository.root, find_releases(repository, standing.name)
    last = releases[-1].version if releases else None
    version = target_version(last, standing.version, part)
    target = replace(standing, version=version)
    fragments = f"{standing.folder}/changelog.d"
    if not [one for one in (root / fragments).glob("*.md") if one.name != "README.md"]:
        raise ValueError(
            f"{fragments} holds nothing; say there what changed, as in +name.added.md."
        )
    if repository.git("tag", "--list", target.tag):
        raise ValueError(f"the tag {target.tag} exists; a release is made once.")
    fault = check_file(root, standing)
    fault = fault or check_version(root, standing, version, releases)
    if fault:
        raise ValueError(fault)
    return target


def target_version(last: Version | None, standing: Version, part: str) -> Version:
    """Returns the version that follows ``last``, which may stand there already."""
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


def make_clone(repository: Repository, folder: Path) -> Repository:
    """Clones the repository with its settings, such as who commits."""
    absolute = ("rev-parse", "--path-format=absolute", "--git-common-dir")
    settings = Path(repository.git(*absolute)) / "config"
    repository.git("clone", "--quiet", "--shared", repository.root, folder)
    clone = Repository(folder)
    clone.git("config", "include.path", settings)
    return clone


def commit(tree: Repository, target: Manifest) -> None:
    """Writes version and changelog, and commits and tags them."""
    folder = tree.root / target.folder
    run_module("uv", "version", "--frozen", str(target.version), cwd=folder)
    run_module(
        *("towncrier", "build", "--yes", "--config", tree.root / "pyproject.toml"),
        *("--dir", folder, "--name", target.name, "--version", str(target.version)),
        cwd=tree.root,
    )
    tree.git("add", "--all", folder)
    title = f"{target.name} {target.version}"
    tree.git("commit", "--quiet", "--message", f"Release {title}")
    tree.git("tag", "--annotate", "-m", title, target.tag)


def prepare_archives(tree: Repository, target: Manifest, folder: Path) -> list[Path]:
    """Builds the archives twice, compares and checks them; returns the first ones.

    The second build is made from the files of the commit in another folder, and both
    have its time, so that whoever has the commit can build the same.
    """
    epoch = tree.git("log", "-1", "--format=%ct")
    source = tree.root / target.folder
    first, again = folder / "archives" / target.name, folder / "again" / target.name
    build(source, first, epoch=epoch)
    committed = tree.export("HEAD", again / "tree") / target.folder
    build(committed, again / "archives", epoch=epoch)
    check_same_bytes(first, again / "archives")
    return check_archives(first, source / "pyproject.toml")


def check_same_bytes(one: Path, other: Path) -> None:
    """Refuses two folders whose files differ in name or bytes; names every one."""
    try:
        run("git", "diff", "--no-index", "--no-renames", "--name-status", one, other)
    except RuntimeError as error:
        raise RuntimeError(f"two builds must give the same bytes.\n{error}") from None


def check_archives(folder: Path, pyproject: Path) -> list[Path]:
    """Has the tools that indexes and users rely on check archives; lists these."""
    archives = [*folder.glob("*.tar.gz"), *folder.glob("*.whl")]
    run_module("validate_pyproject", pyproject)
    run_module("twine", "check", "--strict", *archives)
    run_module("check_wheel_contents", archives[-1])
    return archives


def install(target: Manifest, wheels: dict[Path, Manifest]) -> None:
    """Loads a release from its wheel, with its newest siblings and no other of ours.

    The wheels are a package's and its siblings', so that none comes from an index.
    """
    try:
        chosen = choose(wheels, [target])
    except ValueError as error:
        raise ValueError(
            f"{target.name} admits no set of released siblings; release those first, "
            f"or with it: {error}"
        ) from None
    clean = ("--isolated", "--no-project", "--quiet", "--python", sys.executable)
    installed = [word for wheel in chosen for word in ("--with", wheel)]
    program = ("python", "-I", "-c", _USE.format(module=target.module))
    try:
        run_module("uv", "run", *clean, *installed, "--", *program)
    except RuntimeError as error:
        raise RuntimeError(
            f"{target.module} does not load from its wheel in a clean environment:"
            f"\n{error}"
        ) from None


def bring_back(
    repository: Repository, clone: Repository, targets: Iterable[Manifest]
) -> None:
    """Moves the branch and sets the tags, all or none."""
    branch = repository.git("symbolic-ref", "HEAD")
    refs = [f"HEAD:{branch}", *(f"refs/tags/{target.tag}" for target in targets)]
    receive = ("--receive-pack", _RECEIVE)
    try:
        clone.git("push", "--quiet", "--atomic", *receive, repository.root, *refs)
    except RuntimeError as error:
        raise RuntimeError(
            f"{branch} or its files changed while the release was checked; start "
            f"again.\n{error}"
        ) from None


def _tags(targets: Iterable[Manifest]) -> str:
    return ", ".join(target.tag for target in targets)


if __name__ == "__main__":
    sys.exit(main())
