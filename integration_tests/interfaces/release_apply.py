"""Makes a planned release, whole or not at all; the last step of ``release``.

All work is done in a second working tree. The branch and the tags move at the very
end, when every commit has been built, checked and installed; whatever fails before
leaves the first tree as it was. Nothing is published.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from interfaces.artifacts import build_archives, check_archives, check_same_bytes
from interfaces.clean_install import check_clean_install
from interfaces.manifest import read_manifests, with_version
from interfaces.old_wheels import built_wheel, release_wheel
from interfaces.quietly import run_quietly
from interfaces.release_plan import ReleasePlan, check_clean, check_tag
from interfaces.release_targets import Target, installable_with
from interfaces.released import find_all_releases
from interfaces.repository import Repository

ARCHIVES = Path("out") / "release"


def main() -> int:
    """Makes the release; returns 1 where it failed, with nothing changed."""
    parser = argparse.ArgumentParser(prog="release", description=__doc__)
    parser.add_argument("plan", type=Path)
    options = parser.parse_args()
    plan = ReleasePlan.from_json(options.plan.read_text())
    root = Path.cwd()
    try:
        with tempfile.TemporaryDirectory() as folder:
            apply(Repository(root), plan, Path(folder))
    except (RuntimeError, ValueError) as error:
        sys.stderr.write(f"release: {error}\nNothing was released.\n")
        return 1
    tags = ", ".join(target.tag for target in plan.targets)
    sys.stdout.write(f"Released {tags}; archives lie in {ARCHIVES}/.\n")
    return 0


def apply(repository: Repository, plan: ReleasePlan, folder: Path) -> None:
    """Prepares all commits in ``folder``, then moves the branch and sets the tags."""
    check_unmoved(repository, plan)
    commits = []
    with second_tree(repository, plan.head, folder / "tree") as tree:
        for target in plan.targets:
            sys.stdout.write(f"{target.tag}: commit, build, check, install\n")
            sys.stdout.flush()
            commits.append(commit(tree, target, plan.epoch))
            archives = prepare_archives(tree, target, plan, folder)
            install(repository, target, plan, folder, archives)
    check_unmoved(repository, plan)
    publish_here(repository, plan.targets, commits)
    keep_archives(folder / "archives", repository.root / ARCHIVES)


def check_unmoved(repository: Repository, plan: ReleasePlan) -> None:
    """Refuses to go on when the tree is no longer what was checked."""
    check_clean(repository)
    head = repository.git("rev-parse", "HEAD")
    if head != plan.head:
        raise ValueError(
            f"HEAD moved from {plan.head[:9]} to {head[:9]} while the release was "
            f"checked; start again."
        )
    for target in plan.targets:
        check_tag(repository, target)


@contextmanager
def second_tree(
    repository: Repository, head: str, folder: Path
) -> Iterator[Repository]:
    """Makes a working tree of its own for a commit, and removes it in the end."""
    repository.git("worktree", "add", "--detach", str(folder), head)
    try:
        yield Repository(folder)
    finally:
        repository.git("worktree", "remove", "--force", str(folder))


def commit(tree: Repository, target: Target, epoch: int) -> str:
    """Writes version and changelog, and commits them; returns the commit."""
    folder = tree.root / "packages" / target.package
    pyproject = folder / "pyproject.toml"
    pyproject.write_text(with_version(pyproject.read_text(), target.version))
    run_quietly(
        *("towncrier", "build", "--yes", "--config", str(tree.root / "pyproject.toml")),
        *("--dir", str(folder), "--name", target.package),
        *("--version", str(target.version)),
        *("--date", datetime.fromtimestamp(epoch, UTC).date().isoformat()),
        cwd=tree.root,
    )
    tree.git("add", "--all", str(folder))
    date = f"{epoch} +0000"
    dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    message = f"Release {target.package} {target.version}"
    tree.git("commit", "--quiet", "--message", message, env=dates)
    return tree.git("rev-parse", "HEAD")


def prepare_archives(
    tree: Repository, target: Target, plan: ReleasePlan, folder: Path
) -> list[Path]:
    """Builds the archives twice, compares and checks them; returns the first ones."""
    name = target.package
    source = tree.root / "packages" / name
    archives = build_archives(source, folder / "archives" / name, epoch=plan.epoch)
    again = tree.export("HEAD", folder / "again" / name / "tree") / "packages" / name
    second = folder / "again" / name / "archives"
    build_archives(again, second, epoch=plan.epoch)
    check_same_bytes(folder / "archives" / name, second)
    check_archives(archives, source / "pyproject.toml")
    return archives


def install(
    repository: Repository,
    target: Target,
    plan: ReleasePlan,
    folder: Path,
    archives: Sequence[Path],
) -> None:
    """Installs the wheel with those of its siblings in a clean environment."""
    manifests = read_manifests(repository.root)
    releases = find_all_releases(repository, manifests)
    siblings = installable_with(target, plan.targets, manifests, releases)
    built = folder / "siblings" / target.package
    wheels = [path for path in archives if path.suffix == ".whl"]
    wheels += [
        release_wheel(one, repository, built)
        if one.commit
        else built_wheel(one, folder / "archives" / one.manifest.name)
        for one in siblings
    ]
    check_clean_install(manifests[target.package].module, wheels)


def publish_here(
    repository: Repository, targets: Sequence[Target], commits: Sequence[str]
) -> None:
    """Sets the tags and moves the branch, or takes the tags back."""
    tagged = []
    try:
        for target, made in zip(targets, commits, strict=True):
            title = f"{target.package} {target.version}"
            repository.git("tag", "--annotate", "-m", title, target.tag, made)
            tagged.append(target.tag)
        repository.git("merge", "--quiet", "--ff-only", commits[-1])
    except BaseException:
        if tagged:
            repository.git("tag", "--delete", *tagged)
        raise


def keep_archives(made: Path, folder: Path) -> None:
    """Copies the archives of a release to where they can be uploaded from."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(made.glob("*/*")):
        shutil.copy(path, folder)


if __name__ == "__main__":
    sys.exit(main())
