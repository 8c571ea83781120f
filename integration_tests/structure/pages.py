"""Writes the programs of pages into a folder, for ``mypy`` and ``pyright`` to read.

A user's checker sees what theirs sees: the packages have types, TensorFlow and Keras do
not. A line has the number that it has on the page.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.docs_blocks import PAGES, READMES, ROOT, Block, python_blocks

SETTINGS = {
    "enableTypeIgnoreComments": False,  # They are for mypy.
    "extraPaths": sorted(map(str, ROOT.glob("packages/*/src"))),
    "reportMissingImports": False,
    "reportMissingModuleSource": False,
    # In one page are several programs, some with loops of a known number of steps.
    "reportIncompatibleMethodOverride": False,
    "reportPossiblyUnboundVariable": False,
    "reportRedeclaration": False,
}
# As for mypy: pyright's types of TensorFlow are of a part, those of Keras are guessed.
UNTYPED = "from typing import Any\n\ndef __getattr__(name: str) -> Any: ...\n"


def programs(page: Path) -> Iterator[tuple[str, str]]:
    """Yields a page's programs: a name, and the code, at the lines that it has there.

    A block that is a file is a program, and so is each of a README; the others of a
    page are one, as they run together.
    """
    own = python_blocks(page)
    alone = [block for block in own if block.file_name or page in READMES]
    parts = [[block for block in own if block not in alone], *([one] for one in alone)]
    stem = "_".join(page.relative_to(ROOT).with_suffix("").parts).replace("-", "_")
    for number, part in enumerate(filter(None, parts)):
        yield f"{stem}_{number}.py" if number else f"{stem}.py", _joined(part)


def _joined(blocks: Sequence[Block]) -> str:
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes all programs, and pyright's settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("into", type=Path)
    into = parser.parse_args().into
    into.mkdir(parents=True, exist_ok=True)
    for old in into.glob("*.py"):
        old.unlink()
    # Pages on the design have code of the packages, not of users.
    for page in (*READMES, *(one for one in PAGES if one.parent.name != "design")):
        for name, code in programs(page):
            (into / name).write_text(code)
    slips = os.path.relpath(Path(__file__).with_name("slips.py"), into)
    settings = {"include": [".", slips], **SETTINGS}
    (into / "pyrightconfig.json").write_text(json.dumps(settings))
    for module in ("keras", "tensorflow", "tf_keras"):
        stub = into / "typings" / module / "__init__.pyi"
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(UNTYPED)


if __name__ == "__main__":
    main()
