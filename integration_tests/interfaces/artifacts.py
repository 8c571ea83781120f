"""Archives of a release: built twice to the same bytes, and checked.

The first build is made where the release was prepared, the second from the files of its
commit in another folder, so that whoever has the commit can build the same.
"""

from pathlib import Path

from interfaces.quietly import run_quietly


def build_archives(source: Path, into: Path, *, epoch: int) -> list[Path]:
    """Builds the sdist of a package, and its wheel from that.

    Args:
      source: the package's folder.
      into: where they are left; empty before.
      epoch: the time that all files in them get, in seconds since 1970.

    Returns:
      The paths of both, sorted.
    """
    into.mkdir(parents=True)
    run_quietly(
        *("build", "--no-isolation", "--outdir", str(into), str(source)),
        env={"SOURCE_DATE_EPOCH": str(epoch)},
    )
    return sorted(path for path in into.iterdir() if path.suffix in (".gz", ".whl"))


def check_same_bytes(one: Path, other: Path) -> None:
    """Compares two folders of archives.

    Raises:
      RuntimeError: names or bytes differ; every such file is named.
    """
    names = sorted({path.name for folder in (one, other) for path in folder.iterdir()})
    different = [name for name in names if _bytes(one / name) != _bytes(other / name)]
    if different:
        raise RuntimeError(
            f"two builds must give the same bytes; {different} differ between {one} "
            f"and {other}."
        )


def check_archives(archives: list[Path], pyproject: Path) -> None:
    """Checks archives and metadata with the tools that indexes and users rely on.

    Raises:
      RuntimeError: a tool finds a fault.
    """
    run_quietly("validate_pyproject", str(pyproject))
    run_quietly("twine", "check", "--strict", *map(str, archives))
    wheels = [path for path in archives if path.suffix == ".whl"]
    run_quietly("check_wheel_contents", *map(str, wheels))


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
