"""A repository in miniature, with packages, releases and a history, for the tests."""

import re
from collections.abc import Mapping
from pathlib import Path

from interfaces.api import write_file
from interfaces.manifest import read_manifests
from interfaces.repository import Repository

_PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
description = "A toy"
readme = "README.md"
requires-python = ">=3.11"
dependencies = {needs}

[tool.hatch.build.targets.wheel]
packages = ["src/{module}"]
"""
_MARK = "<!-- releases -->\n"
_DEFINED = re.compile(r"^(?:def |class )?(work|more)\b", re.MULTILINE)

WORK = "def work(size: int = 1) -> int:\n    return size\n"


class ToyRepository(Repository):
    """A git repository below a temporary folder; every change is told explicitly."""

    @classmethod
    def create(cls, root: Path, settings: str = "") -> "ToyRepository":
        """Starts one with a pyproject.toml and no package."""
        root.mkdir()
        made = cls(root)
        made.git("init", "--quiet", "--initial-branch", "main")
        made.git("config", "user.name", "A developer")
        made.git("config", "user.email", "developer@example.org")
        made.git("config", "commit.gpgSign", "false")
        made.git("config", "tag.gpgSign", "false")
        (root / "pyproject.toml").write_text(settings)
        made.commit("Start")
        return made

    def package(
        self, name: str, version: str, needs: Mapping[str, str] | None = None
    ) -> Path:
        """Writes a package with one function, or rewrites its pyproject.toml."""
        folder = self.root / "packages" / name
        module = name.replace("-", "_")
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / "README.md").write_text(f"# {name}\n\nA toy.\n")
            (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n{_MARK}")
            self.write_work(name, WORK)
        lines = [f"{need}{bound}" for need, bound in (needs or {}).items()]
        text = _PYPROJECT.format(name=name, module=module, version=version, needs=lines)
        (folder / "pyproject.toml").write_text(text)
        return folder

    def write_work(self, name: str, source: str) -> None:
        """Writes a package's module; its ``work`` and ``more`` are exported."""
        module = name.replace("-", "_")
        folder = self.root / "packages" / name / "src" / module
        folder.mkdir(parents=True, exist_ok=True)
        names = list(dict.fromkeys(_DEFINED.findall(source)))
        stub = "".join(f"from {module}._work import {n} as {n}\n" for n in names)
        (folder / "_work.py").write_text(source)
        (folder / "__init__.pyi").write_text(stub)
        (folder / "__init__.py").write_text(f"{stub}__all__ = {names}\n")

    def fragment(self, name: str, text: str) -> None:
        """Leaves a line for the next section of a changelog."""
        folder = self.root / "packages" / name / "changelog.d"
        folder.mkdir(exist_ok=True)
        (folder / "+toy.added.md").write_text(f"{text}\n")

    def freeze(self, name: str) -> None:
        """Writes the interface file of a package."""
        write_file(self.root, read_manifests(self.root)[name])

    def commit(self, message: str) -> str:
        """Commits everything; returns the commit."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        return self.git("rev-parse", "HEAD")

    def released(
        self, name: str, version: str, needs: Mapping[str, str] | None = None
    ) -> str:
        """Commits a release of a package, as the tool would; returns the commit."""
        changelog = self.package(name, version, needs) / "CHANGELOG.md"
        self.freeze(name)
        section = f"{_MARK}\n## {version} (2025-01-01)\n"
        changelog.write_text(changelog.read_text().replace(_MARK, section))
        return self.commit(f"Release {name} {version}")
