"""A repository in miniature, with packages, releases and a history, for the tests."""

from collections.abc import Mapping
from pathlib import Path

from interfaces.api import write
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
dependencies = [{needs}]

[tool.hatch.build.targets.wheel]
packages = ["src/{module}"]
"""

_INIT = """\
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from {module}._work import work

__all__ = ["work"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(name)
    return getattr(import_module("{module}._work"), name)
"""

WORK = "def work(size: int = 1) -> int:\n    return size\n"


class ToyRepository(Repository):
    """A git repository below a temporary folder; every change is told explicitly."""

    @classmethod
    def create(cls, root: Path, towncrier: str = "") -> "ToyRepository":
        """Starts one with a settings file and no package."""
        root.mkdir()
        made = cls(root)
        made.git("init", "--quiet", "--initial-branch", "main")
        made.git("config", "user.name", "A developer")
        made.git("config", "user.email", "developer@example.org")
        made.git("config", "commit.gpgSign", "false")
        made.git("config", "tag.gpgSign", "false")
        (root / "pyproject.toml").write_text(towncrier)
        made.commit("Start")
        return made

    def package(
        self, name: str, version: str, needs: Mapping[str, str] | None = None
    ) -> Path:
        """Writes a package with one function, or rewrites its pyproject.toml."""
        folder = self.root / "packages" / name
        module = name.replace("-", "_")
        lines = ", ".join(f'"{n}{bound}"' for n, bound in (needs or {}).items())
        source = folder / "src" / module
        if not source.exists():
            source.mkdir(parents=True)
            (folder / "README.md").write_text(f"# {name}\n\nA toy.\n")
            (folder / "CHANGELOG.md").write_text("# Changelog\n\n<!-- releases -->\n")
            (source / "__init__.py").write_text(_INIT.format(module=module))
            (source / "_work.py").write_text(WORK)
        text = _PYPROJECT.format(name=name, module=module, version=version, needs=lines)
        (folder / "pyproject.toml").write_text(text)
        return folder

    def fragment(self, name: str, text: str = "Something.") -> None:
        """Leaves a line for the next section of a changelog."""
        folder = self.root / "packages" / name / "changelog.d"
        folder.mkdir(exist_ok=True)
        (folder / "+toy.added.md").write_text(f"{text}\n")

    def freeze(self, name: str) -> None:
        """Writes the interface file of a package."""
        write(self.root, read_manifests(self.root)[name])

    def commit(self, message: str) -> str:
        """Commits everything; returns the commit."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        return self.git("rev-parse", "HEAD")

    def released(
        self, name: str, version: str, needs: Mapping[str, str] | None = None
    ) -> str:
        """Commits a release of a package, as the tool would; returns the commit."""
        folder = self.package(name, version, needs)
        self.freeze(name)
        changelog = folder / "CHANGELOG.md"
        section = f"<!-- releases -->\n\n## {version} (2025-01-01)\n"
        changelog.write_text(
            changelog.read_text().replace("<!-- releases -->\n", section)
        )
        return self.commit(f"Release {name} {version}")
