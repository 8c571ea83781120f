"""What is asked of git: commits, files as they were, and whether all of it is there."""

import io
import os
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# What git tells a hook of the repository that runs it, and takes before any folder.
_OF_HOOKS = (
    "GIT_COMMON_DIR",
    "GIT_DIR",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_WORK_TREE",
)


def environment_outside_hooks() -> dict[str, str]:
    """Returns this process's variables, without those that bind git to a hook's."""
    return {name: os.environ[name] for name in os.environ if name not in _OF_HOOKS}


@dataclass(frozen=True)
class Repository:
    """A git repository with its working tree in ``root``."""

    root: Path

    def git(self, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        """Runs git and returns what it prints.

        Args:
          *arguments: of git.
          env: variables to set for it.

        Raises:
          RuntimeError: git fails; the message is its own.
        """
        return self._run(*arguments, env=env).decode().strip()

    def commits(self, *paths: str) -> list[str]:
        """Lists the commits up to HEAD that changed one of ``paths``, oldest first.

        Raises:
          RuntimeError: the clone is shallow, so that older ones are not there.
        """
        self.check_complete()
        order = ("--topo-order", "--reverse", "--format=%H")
        return self.git("log", *order, "HEAD", "--", *paths).split()

    def read(self, commit: str, path: str) -> str | None:
        """Reads a file as of ``commit``; None where there was none."""
        if not self.git("ls-tree", "--name-only", commit, "--", path):
            return None
        return self._run("cat-file", "blob", f"{commit}:{path}").decode()

    def export(self, commit: str, into: Path) -> Path:
        """Writes the files of ``commit`` into a new folder, without git's own."""
        into.mkdir(parents=True)
        archive = self._run("archive", "--format=tar", commit)
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(into, filter="data")
        return into

    def check_complete(self) -> None:
        """Refuses a clone whose history was cut off.

        Raises:
          RuntimeError: the clone is shallow, or there is no repository.
        """
        if lack := self.lack_of_history():
            raise RuntimeError(lack)

    def lack_of_history(self) -> str:
        """Says why earlier commits cannot be read, or nothing."""
        try:
            is_shallow = self.git("rev-parse", "--is-shallow-repository") == "true"
        except RuntimeError as error:
            return str(error)
        if not is_shallow:
            return ""
        return (
            f"{self.root}: this clone is shallow, so that the commits of earlier "
            f"releases are missing; fetch them with git fetch --unshallow."
        )

    def changes(self) -> list[str]:
        """Lists what the working tree has that HEAD has not, ignored files left out."""
        return self._run("status", "--porcelain").decode().splitlines()

    def _own_only(self) -> dict[str, str]:
        """Has git take no repository around an unpacked archive for its own."""
        return {"GIT_CEILING_DIRECTORIES": str(self.root.resolve().parent)}

    def _run(self, *arguments: str, env: Mapping[str, str] | None = None) -> bytes:
        done = subprocess.run(
            ["git", "-C", str(self.root), *arguments],
            env={**environment_outside_hooks(), **self._own_only(), **(env or {})},
            capture_output=True,
            check=False,
        )
        if done.returncode:
            said = done.stderr.decode().strip()
            raise RuntimeError(f"git {arguments[0]} in {self.root} failed: {said}")
        return done.stdout
