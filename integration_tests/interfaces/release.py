"""Releases packages, whole or not at all.

What can be refused at once is refused first. Then each package is committed, tagged,
built, checked and installed in a clone, and the sessions ``compat`` and ``integration``
run. One atomic push brings branch and tags back at the very end: whatever fails before
leaves the repository as it was. Nothing is published.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from interfaces.api import check, check_file, due_version
from interfaces.citation import cite
from interfaces.manifest import Manifest, find_releases, needed_by, read_manifests
from interfaces.repository import Repository, build, run_module
from interfaces.repository import run as run_tool
from interfaces.siblings import Wheels, build_wheels, built_wheels, choose

ARCHIVES = Path("out") / "release"
ALL = "all"
# Has the branch that is checked out move together with its files, if these are clean.
_RECEIVE = "git -c receive.denyCurrentBranch=updateInstead receive-pack"
_USE = """
import {module} as module
for name in module.__all__:
    getattr(module, name)
"""


def run(root: Path, packages: Sequence[str], nox: str) -> None:
    """Makes the release, or raises with nothing changed."""
    try:
        targets = release(root, packages, partial(run_sessions, nox))
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(f"{error}\nNothing was released.") from None
    sys.stdout.write(f"Released {_tags(targets)}; archives lie in {ARCHIVES}/.\n")


def run_sessions(python: str, targets: Sequence[Manifest]) -> None:
    """Runs the sessions that a release must pass; raises where one fails."""
    compats = [f"compat({target.name})" for target in targets]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-m", "nox", "-s", *compats, "integration"]
    if subprocess.run(command, env=env, check=False).returncode:
        raise RuntimeError(f"{', '.join(compats)} and integration must pass.")


def release(
    root: Path, words: Sequence[str], test: Callable[[Sequence[Manifest]], None]
) -> list[Manifest]:
    """Makes a release, where ``test`` does not raise.

    Returns the released packages, each after all those that it needs. ``ValueError`` is
    what stands against the release, and ``RuntimeError`` a tool that fails.
    """
    repository = Repository(root)
    targets = plan(repository, words)
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
            made = folder / "archives" / target.name
            build_twice(clone, target, made)
            install(target, wheels := wheels | built_wheels([target], made))
        test(targets)
        bring_back(repository, clone, targets)
        shutil.copytree(folder / "archives", root / ARCHIVES, dirs_exist_ok=True)
    return targets


def plan(repository: Repository, words: Sequence[str]) -> list[Manifest]:
    """Decides the versions and checks all that can be checked without building.

    ``ValueError`` is what stands against the release, of every package.
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
    wanted = [one for name, one in manifests.items() if name in words or ALL in words]
    targets = [next_release(repository, one) for one in wanted]
    faults = [
        f"{one.name}: {fault}"
        for one in targets
        if (fault := find_fault(repository, one))
    ]
    if faults:
        raise ValueError("\n".join(faults))
    return targets


def next_release(repository: Repository, standing: Manifest) -> Manifest:
    """Returns the version that stands there, or what follows if it is released.

    What follows is the next patch: a change of the interface that demands more has
    raised the version itself, as the session ``api`` wants it.
    """
    released = [one.version for one in find_releases(repository, standing.name)]
    if standing.version not in released[-1:]:
        return standing
    return replace(standing, version=due_version(standing.version, ["+"]))


def find_fault(repository: Repository, target: Manifest) -> str:
    """Says what stands against the release of a package, or nothing."""
    if not _fragments(repository, target):
        return (
            f"{target.folder}/changelog.d holds nothing; say there what changed, as in "
            f"+name.added.md."
        )
    if repository.git("tag", "--list", target.tag):
        return f"the tag {target.tag} exists; a release is made once."
    return check(repository.root, target)


def _fragments(repository: Repository, target: Manifest) -> list[str]:
    folder = repository.root / target.folder / "changelog.d"
    return sorted(p.name for p in folder.glob("*.md") if p.name != "README.md")


def make_clone(repository: Repository, folder: Path) -> Repository:
    """Clones the repository with its settings, such as who commits."""
    absolute = ("rev-parse", "--path-format=absolute", "--git-common-dir")
    settings = Path(repository.git(*absolute)) / "config"
    repository.git("clone", "--quiet", "--shared", repository.root, folder)
    clone = Repository(folder)
    clone.git("config", "include.path", settings)
    return clone


def commit(tree: Repository, target: Manifest) -> None:
    """Writes version, changelog and citation, and commits and tags them."""
    folder = tree.root / target.folder
    run_module("uv", "version", "--frozen", str(target.version), cwd=folder)
    run_module(
        *("towncrier", "build", "--yes", "--config", tree.root / "pyproject.toml"),
        *("--dir", folder, "--name", target.name, "--version", str(target.version)),
        cwd=tree.root,
    )
    tree.git("add", "--all", folder, *filter(None, [cite(tree.root)]))
    title = f"{target.name} {target.version}"
    tree.git("commit", "--quiet", "--message", f"Release {title}")
    tree.git("tag", "--annotate", "-m", title, target.tag)


def build_twice(tree: Repository, target: Manifest, into: Path) -> None:
    """Builds the archives of HEAD twice, compares and checks them, and leaves one pair.

    The second build is made from the files of the commit in another folder, and both
    have its time, so that whoever has the commit can build the same.
    """
    epoch = tree.git("log", "-1", "--format=%ct")
    with tempfile.TemporaryDirectory() as name:
        first, again = Path(name) / "first", Path(name) / "again"
        committed = tree.export("HEAD", Path(name) / "tree")
        build(tree.root / target.folder, first, epoch=epoch)
        build(committed / target.folder, again, epoch=epoch)
        check_same_bytes(first, again)
        check_archives(first, committed / target.folder / "pyproject.toml")
        shutil.copytree(first, into)


def check_same_bytes(one: Path, other: Path) -> None:
    """Refuses two folders whose files differ in name or bytes; names every one."""
    try:
        run_tool(
            *("git", "diff", "--no-index", "--no-renames", "--name-status", one, other)
        )
    except RuntimeError as error:
        raise RuntimeError(f"two builds must give the same bytes.\n{error}") from None


def check_archives(folder: Path, pyproject: Path) -> None:
    """Has the tools that indexes and users rely on check archives."""
    run_module("validate_pyproject", pyproject)
    run_module("twine", "check", "--strict", *folder.iterdir())
    run_module("check_wheel_contents", *folder.glob("*.whl"))


def install(target: Manifest, wheels: Wheels) -> None:
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


def build_tagged(root: Path, tag: str) -> Path:
    """Checks a release by its tag, and builds what is published of it.

    The session ``release`` makes the tag, where its maker works. What is published is
    built once more where the tag arrives, from nothing but the tagged commit: the
    workflow ``release.yml`` runs this, and uploads what is in the returned folder, the
    sdist and the wheel and nothing else.
    """
    repository = Repository(root)
    target = check_tag(repository, tag)
    folder = root / ARCHIVES / target.name
    shutil.rmtree(folder, ignore_errors=True)
    build_twice(repository, target, folder)
    sys.stdout.write(
        f"{folder}: {', '.join(sorted(p.name for p in folder.iterdir()))}\n"
    )
    return folder


def check_tag(repository: Repository, tag: str) -> Manifest:
    """Returns the package that ``tag`` releases, where everything says the same.

    ``ValueError`` is what does not, all of it.
    """
    manifests = read_manifests(repository.root)
    name = tag.rpartition("-v")[0]
    if name not in manifests:
        raise ValueError(
            f"got the tag {tag!r}; wanted one such as "
            f"{' or '.join(one.tag for one in manifests.values())}."
        )
    target = manifests[name]
    if faults := list(_find_disagreements(repository, target, tag)):
        raise ValueError("\n".join(f"{tag}: {fault}" for fault in faults))
    return target


def _find_disagreements(
    repository: Repository, target: Manifest, tag: str
) -> Iterator[str]:
    if target.tag != tag:
        yield f"pyproject.toml says {target.version}."
    if not repository.git("tag", "--list", tag):
        yield "there is no such tag."
        return
    head, named = repository.git("rev-parse", "HEAD", f"{tag}^{{commit}}").split()
    if head != named:
        yield f"it names {named[:9]}; checked out is {head[:9]}."
    dated = [str(one.version) for one in find_releases(repository, target.name)]
    if str(target.version) not in dated:
        listed = ", ".join(dated) or "none"
        yield (
            f"CHANGELOG.md has no dated section for {target.version}, only for "
            f"{listed}."
        )
    if left := _fragments(repository, target):
        yield f"changelog.d holds {left}, which no release has."
    if fault := check_file(repository.root, target):
        yield fault


def _tags(targets: Iterable[Manifest]) -> str:
    return ", ".join(target.tag for target in targets)
