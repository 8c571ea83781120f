"""CITATION.cff names the last release: its version and its date."""

import re
from pathlib import Path

from packaging.version import Version

FILE = "CITATION.cff"
SECTION = re.compile(r"^## (\S+) \((\d{4}-\d{2}-\d{2})\)$", re.MULTILINE)
_KEYS = re.compile(r"^(version|date-released): .*\n", re.MULTILINE)


def last_release(root: Path) -> tuple[str, str]:
    """Returns the date of the last release and the highest version of that day."""
    found = [
        (date, Version(version))
        for path in root.glob("packages/*/CHANGELOG.md")
        for version, date in SECTION.findall(path.read_text(encoding="utf-8"))
    ]
    date, version = max(found)
    return str(version), date


def cite(root: Path) -> Path | None:
    """Writes the last release into the citation of a tree; None where it has none."""
    path = root / FILE
    if not path.is_file():
        return None
    version, date = last_release(root)
    text = _KEYS.sub("", path.read_text(encoding="utf-8"))
    new = f'version: "{version}"\ndate-released: "{date}"\n'
    path.write_text(text.replace("license:", f"{new}license:", 1), encoding="utf-8")
    return path
