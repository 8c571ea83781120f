"""A repository in miniature, with packages, releases and a history."""

import re

from interfaces.api import write_files
from interfaces.manifest import read_manifests
from interfaces.repository import Repository

PYPROJECT = """\
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
optional-dependencies.more = {more}

[tool.hatch.build.targets.wheel]
packages = ["src/{module}"]
"""
MARK = "<!-- releases -->\n"
DEFINED = re.compile(r"^(?:def |class )?(work|more|inner)\b", re.MULTILINE)
WORK = "def work(size: int = 1) -> int:\n    return size\n"


class ToyRepository(Repository):
    @classmethod
    def create(cls, root):
        root.mkdir()
        made = cls(root)
        made.git("init", "--quiet", "--initial-branch", "main")
        for setting in ("user.name A", "user.email a@b.org", "tag.gpgSign false"):
            made.git("config", *setting.split())
        made.git("config", "commit.gpgSign", "false")
        made.commit("Start")
        return made

    def package(self, name, version, needs=(), more=()):
        """Writes a package with one function, or rewrites its pyproject.toml."""
        folder = self.root / "packages" / name
        if not folder.exists():
            (folder / "changelog.d").mkdir(parents=True)
            (folder / "README.md").write_text(f"# {name}\n")
            (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n{MARK}")
            self.write(name, WORK)
        values = {"name": name, "module": name.replace("-", "_"), "version": version}
        text = PYPROJECT.format(**values, needs=list(needs), more=list(more))
        (folder / "pyproject.toml").write_text(text)
        return folder

    def write(self, name, source, face="__init__"):
        """Writes what the front of a package exports, or its ``internal``."""
        module = name.replace("-", "_")
        folder = self.root / "packages" / name / "src" / module
        folder.mkdir(parents=True, exist_ok=True)
        home = {"__init__": "_work", "internal": "_inner"}[face]
        names = list(dict.fromkeys(DEFINED.findall(source)))
        stub = "".join(f"from {module}.{home} import {n} as {n}\n" for n in names)
        (folder / f"{home}.py").write_text(source)
        (folder / f"{face}.pyi").write_text(stub)
        (folder / f"{face}.py").write_text(f"{stub}__all__ = {names}\n")

    def freeze(self, name):
        write_files(self.root, read_manifests(self.root)[name])

    def commit(self, message="Work on"):
        """Commits everything; returns the commit."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        return self.git("rev-parse", "HEAD")

    def released(self, name, version, needs=()):
        """Commits a release of a package, as the tool would; returns the commit."""
        changelog = self.package(name, version, needs) / "CHANGELOG.md"
        self.freeze(name)
        section = f"{MARK}\n## {version} (2025-01-01)\n"
        changelog.write_text(changelog.read_text().replace(MARK, section))
        return self.commit(f"Release {name} {version}")
