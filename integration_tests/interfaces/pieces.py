"""Runs the examples of a README, with nothing but the standard library.

The session ``pieces`` installs one package with its requirements, and nothing else.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.docs_blocks import files, launches, python_blocks

DEADLINE_S = 240


def commands(readme: Path, folder: Path) -> list[list[str]]:
    """Lists what runs a README's examples in ``folder``, where programs are left.

    A README that starts its programs with ``tw-launch`` has them run that way.
    """
    for name, code in files(readme).items():
        (folder / name).write_text(code)
    if launched := launches(readme):
        return [launch.command for launch in launched]
    # One program, in which every block starts with nothing defined.
    program = "\n".join(
        f"exec(compile({block.code!r}, 'README block {i}', 'exec'), {{}})"
        for i, block in enumerate(python_blocks(readme), start=1)
    )
    return [[sys.executable, "-c", program]] if program else []


def main(words: list[str] | None = None) -> int:
    """Runs the examples; returns 1 where one fails or the README has none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readme", type=Path)
    readme = parser.parse_args(words).readme
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        found = commands(readme, Path(folder))
        for command in found:
            ran = subprocess.run(command, cwd=folder, env=env, timeout=DEADLINE_S)
            if ran.returncode:
                return 1
    sys.stderr.write("" if found else f"{readme} has no block ```python to run.\n")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
