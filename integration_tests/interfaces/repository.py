"""What is asked of git and of other tools, free of the hook that may run this."""

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Words = str | Path


@cache
def _of_hooks() -> list[str]:
    """Lists what git tells a hook, and takes before any folder."""
    command = ["git", "rev-parse", "--local-env-vars"]
    return subprocess.run(command, stdout=subprocess.PIPE).stdout.decode().split()


def run(
    *command: Words, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> bytes:
    """Runs a command and returns what it prints.

    Raises:
      RuntimeError: it fails; the message holds all that it said.
    """
    # Not only git: tools call it too.
    outside = {name: os.environ[name] for name in os.environ.keys() - _of_hooks()}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**outside, **(env or {})},
        capture_output=True,
        check=False,
    )
    if done.returncode:
        words = " ".join(map(str, command))
        said = (done.stdout + done.stderr).decode(errors="replace")
        raise RuntimeError(f"{words} failed with status {done.returncode}:\n{said}")
    return done.stdout


def run_module(
    module: str,
    *arguments: Words,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Runs ``python -m module`` with this interpreter; as ``run``."""
    return run(sys.executable, "-m", module, *arguments, cwd=cwd, env=env).decode()


def build(source: Path, into: Path, *options: str, epoch: str = "") -> None:
    """Has uv build archives of a package's folder, with what is installed here.

    Args:
      source: the package's folder.
      into: where the archives are left.
      *options: of ``uv build``; without any it makes a wheel from an sdist.
      epoch: the time that all files in them get, in seconds since 1970.
    """
    clock = {"SOURCE_DATE_EPOCH": epoch} if epoch else {}
    here = ("--no-build-isolation", "--python", sys.executable, "--out-dir", into)
    options = ("--no-create-gitignore", *options)
    run_module("uv", "build", *here, *options, source, env=clock)


@dataclass(frozen=True)
class Repository:
    """A git repository with its working tree in ``root``."""

    root: Path

    def git(self, *arguments: Words) -> str:
        """Runs git and returns what it prints; ``RuntimeError`` where it fails."""
        return self._run(*arguments).decode().strip()

    def export(self, commit: str, into: Path, *paths: str) -> Path:
        """Writes files of ``commit``, by default all, into a new folder."""
        into.mkdir(parents=True)
        archive = self._run("archive", "--format=tar", commit, "--", *paths)
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(into, filter="data")
        return into

    def _run(self, *arguments: Words) -> bytes:
        # Git is to take no repository around an unpacked archive for its own.
        ceiling = {"GIT_CEILING_DIRECTORIES": str(self.root.resolve().parent)}
        return run("git", "-C", self.root, *arguments, env=ceiling)
