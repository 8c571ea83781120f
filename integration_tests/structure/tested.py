"""Records in docs/tested.md the versions with which the packages' tests passed.

The session ``matrix`` calls it after a run without a failure:
python -m structure.tested DEPENDENCIES [arguments of pytest].
"""

import platform
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from structure.tables import Row, merged, read_rows, write_rows

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tested.md"
COLUMNS = (
    *("dependencies", "TensorFlow", "Keras", "NumPy", "Python", "platform"),
    *("tests of", "on"),
)
ALL = "all packages"
_WHOLE = re.compile(r"packages/(tw-\w+)/tests/?")
_HOW = re.compile(r"-[qvx]+|--numprocesses=\d+|-n\d+|--durations=\d+")


def scope(words: Sequence[str]) -> str:
    """Names the packages whose tests pytest ran in full by these arguments.

    Empty where an argument may have left out some of a package's tests.
    """
    chosen = [word for word in words if not _HOW.fullmatch(word)]
    found = [_WHOLE.fullmatch(word) for word in chosen]
    if not all(found):
        return ""
    return ", ".join(sorted({one[1] for one in found if one})) or ALL


def note(text: str, row: Row) -> str:
    """Returns the page with a row more, or in place of the one that it repeats.

    A run of some packages never takes the place of one of all; the other way it does.
    """
    rows = merged(read_rows(text, COLUMNS), [row], _key)
    whole = {_key(one)[:-1] for one in rows if one[6] == ALL}
    kept = [one for one in rows if one[6] == ALL or _key(one)[:-1] not in whole]
    return write_rows(text, COLUMNS, sorted(kept, key=_order, reverse=True))


def _key(row: Row) -> Row:
    """What a later run repeats: patches of TensorFlow and Python do not count."""
    dependencies, tensorflow, _, _, python, system, packages, _ = row
    minor = "" if dependencies == "nightly" else _minor(tensorflow)
    return dependencies, minor, _minor(python), system, packages


def _minor(text: str) -> str:
    return ".".join(text.split(".")[:2])


def _order(row: Row) -> tuple[list[int], list[int], Row]:
    return _numbers(row[1]), _numbers(row[4]), row


def _numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def _installed(name: str, nightly: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return version(nightly)


def main(dependencies: str, *words: str) -> None:
    """Notes a run of today with the versions of this environment."""
    packages = scope(words)
    if not packages:
        print(f"Not recorded in {PAGE.name}: {words} may leave out tests.")
        return
    row = (
        dependencies,
        _installed("tensorflow", "tf-nightly"),
        _installed("keras", "keras-nightly"),
        version("numpy"),
        platform.python_version(),
        f"{platform.system()} {platform.machine()}",
        packages,
        datetime.now(UTC).date().isoformat(),
    )
    PAGE.write_text(note(PAGE.read_text("utf-8"), row), "utf-8")
    print(f"{PAGE}: {' | '.join(row)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
