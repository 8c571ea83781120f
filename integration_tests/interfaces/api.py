"""Checks or writes a package's frozen interface file; the session ``api``."""

import argparse
import sys
from pathlib import Path

from packaging.version import Version

from interfaces import api_file
from interfaces.api_lines import interface_lines
from interfaces.manifest import Manifest, known, read_manifests
from interfaces.released import find_releases
from interfaces.repository import Repository
from interfaces.versions import complaint, due_part, interface_change


def main() -> int:
    """Runs the session; returns 1 where the interface is not as it must be."""
    parser = argparse.ArgumentParser(prog="api", description=__doc__)
    parser.add_argument("package")
    parser.add_argument("--write", action="store_true", help="rewrite the file")
    options = parser.parse_args()
    root = Path.cwd()
    try:
        manifest = known(read_manifests(root), options.package)
        if options.write:
            write(root, manifest)
        return report(check(root, manifest))
    except (RuntimeError, ValueError) as error:
        return report(f"{options.package}: {error}")


def write(root: Path, manifest: Manifest) -> None:
    """Rewrites the interface file from the code."""
    text = api_file.render(manifest.name, code_lines(root, manifest))
    file_of(root, manifest).write_text(text)


def check(root: Path, manifest: Manifest) -> str:
    """Says what is wrong with a package's interface and version, or nothing.

    Where history is missing, as in an archive or a shallow clone, the file is compared
    with the code alone, and that is said.
    """
    fault = check_file(root, manifest)
    if fault:
        return fault
    if lack := Repository(root).lack_of_history():
        sys.stdout.write(f"{manifest.name}: NOT compared with a release: {lack}\n")
        return ""
    fault = check_version(root, manifest, manifest.version)[0]
    return fault and f"{fault} Raise it in pyproject.toml."


def check_file(root: Path, manifest: Manifest) -> str:
    """Says how the interface file and the code differ, or nothing."""
    differs = api_file.difference(frozen(root, manifest), code_lines(root, manifest))
    return differs and (
        f"{differs}\n{manifest.name}: {api_file.NAME} (-) and the code (+) differ; "
        f'if the code is right, run nox -s "api({manifest.name})" -- --write'
    )


def check_version(root: Path, manifest: Manifest, version: Version) -> tuple[str, str]:
    """Compares the interface file with that of the last release.

    Returns:
      Why ``version`` does not suit the change since then, or nothing; and the part
      that the change raises at least, or nothing.
    """
    repository = Repository(root)
    releases = find_releases(repository, manifest.name)
    if not releases:
        sys.stdout.write(f"{manifest.name}: no earlier release to compare with.\n")
        return "", ""
    last = releases[-1]
    path = file_of(Path(), manifest).as_posix()
    promised = api_file.parse(repository.read(last.commit, path) or "")
    sys.stdout.write(f"{manifest.name}: compared with {last}.\n")
    change = interface_change(promised, frozen(root, manifest))
    fault = complaint(last.version, version, change)
    fault = fault and f"{manifest.name}, against its last release:\n{fault}"
    return fault, due_part(last.version, change)


def frozen(root: Path, manifest: Manifest) -> list[str]:
    """Reads the lines of the interface file; none where there is no file."""
    file = file_of(root, manifest)
    return api_file.parse(file.read_text()) if file.exists() else []


def code_lines(root: Path, manifest: Manifest) -> list[str]:
    """Reads the interface from the code of a checkout."""
    sources = root / "packages" / manifest.name / "src"
    return interface_lines(manifest.module, sources)


def file_of(root: Path, manifest: Manifest) -> Path:
    """Returns where the frozen interface lies."""
    return root / "packages" / manifest.name / api_file.NAME


def report(fault: str) -> int:
    """Prints a fault, if any, and returns the exit status that tells of it."""
    if fault:
        sys.stderr.write(f"{fault}\n")
    return 1 if fault else 0


if __name__ == "__main__":
    sys.exit(main())
