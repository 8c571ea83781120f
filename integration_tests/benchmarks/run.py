"""Runs a benchmark by name: python run.py NAME [options]; NAME --help lists them."""

import importlib
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
HERE = Path(__file__).parent
NAMES = sorted(
    path.stem
    for path in HERE.glob("*.py")
    if "def main(" in path.read_text() and path.stem != "run"
)


def main(arguments: list[str]) -> None:
    """Imports the benchmark's module and calls its ``main``."""
    if not arguments or arguments[0] not in NAMES:
        sys.exit(f"run.py: name a benchmark, one of {NAMES}; got {arguments[:1]}.")
    sys.path.insert(0, str(HERE))
    importlib.import_module(arguments[0]).main(arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
