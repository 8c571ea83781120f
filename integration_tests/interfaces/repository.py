"""What is asked of git and of other tools, free of the hook that may run this."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Words = str | Path
# A hook is told these, and git takes them before any folder; tools call git too.
_OF_HOOKS = {"GIT_DIR", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_WORK_TREE"}


def run(
    *command: Words, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    """Runs a command and returns what it prints, without the space around that.

    ``RuntimeError`` with all that it said where it fails.
    """
    outside = {name: os.environ[name] for name in os.environ.keys() - _OF_HOOKS}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**outside, **(env or {})},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        words = " ".join(map(str, command))
        said = done.stdout + done.stderr
        raise RuntimeError(f"{words} failed with status {done.returncode}:\n{said}")
    return done.stdout.strip()


def run_module(*words: Words, **where: Any) -> str:
    """Runs ``python -m`` with this interpreter; as ``run``."""
    return run(sys.executable, "-m", *words, **where)


def build(source: Path, into: Path, *options: str) -> None:
    """Builds archives of a package's folder, with the hatchling that is installed here.

    Without ``options`` it makes a wheel from an sdist. hatchling writes the same time
    into all files, so that the same files give the same bytes.
    """
    here = ("--no-build-isolation", "--python", sys.executable, "--out-dir", into)
    run_module("uv", "build", "--no-create-gitignore", *here, *options, source)


@dataclass(frozen=True)
class Repository:
    """A git repository with its working tree in ``root``."""

    root: Path

    def git(self, *arguments: Words) -> str:
        """Runs git and returns what it prints; ``RuntimeError`` where it fails."""
        # It is to take no repository around an unpacked archive for its own.
        ceiling = {"GIT_CEILING_DIRECTORIES": str(self.root.resolve().parent)}
        return run("git", "-C", self.root, *arguments, env=ceiling)

    def export(self, commit: str, into: Path, *paths: str) -> Path:
        """Writes files of ``commit``, by default all, into a new folder."""
        into.mkdir(parents=True)
        archive = into.resolve().with_name(f"{into.name}.tar")
        self.git("archive", "--output", archive, commit, "--", *paths)
        shutil.unpack_archive(archive, into, filter="data")
        archive.unlink()
        return into
