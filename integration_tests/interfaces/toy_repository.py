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
            (folder / "src" / module).mkdir(parents=True)
            (folder / "README.md").write_text(f"# {name}\n\nA toy.\n")
            (folder / "CHANGELOG.md").write_text("# Changelog\n\n<!-- releases -->\n")
            stub = f"from {module}._work import work as work\n"
            (folder / "src" / module / "__init__.pyi").write_text(stub)
            init = f'{stub}__all__ = ["work"]\n'
            (folder / "src" / module / "__init__.py").write_text(init)
            self.write_work(name, WORK)
        lines = ", ".join(f'"{n}{bound}"' for n, bound in (needs or {}).items())
        text = _PYPROJECT.format(name=name, module=module, version=version, needs=lines)
        (folder / "pyproject.toml").write_text(text)
        return folder

    def write_work(self, name: str, source: str) -> None:
        """Writes the module of a package that holds its function."""
        module = name.replace("-", "_")
        path = self.root / "packages" / name / "src" / module / "_work.py"
        path.write_text(source)

    def fragment(self, name: str, text: str) -> None:
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
        changelog = self.package(name, version, needs) / "CHANGELOG.md"
        self.freeze(name)
        mark = "<!-- releases -->\n"
        section = f"{mark}\n## {version} (2025-01-01)\n"
        changelog.write_text(changelog.read_text().replace(mark, section))
        return self.commit(f"Release {name} {version}")
