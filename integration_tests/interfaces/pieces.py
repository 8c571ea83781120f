"""Proves that a package and what it needs are enough, where nothing else is.

The session ``pieces`` makes an environment, installs one package there by a command of
its README, and runs this: exactly that package and the siblings that it needs are
installed, none of them from an index, each imports in under a tenth of a second without
TensorFlow, and, unless ``--no-example`` ends the command, the README's example runs.
Only the standard library is used, as nothing else may be there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

from docs_blocks import files, launches, python_blocks
from launching import run_to_its_end

ATTEMPTS = 3
IMPORT_LIMIT_S = 0.1
EXAMPLE_DEADLINE_S = 240
NO_EXAMPLE = "--no-example"

_IMPORT = """
import json, sys, time
start = time.perf_counter()
import {module}
seconds = time.perf_counter() - start
print(json.dumps([seconds, "tensorflow" in sys.modules]))
"""


def main() -> int:
    """Checks the package named first, with the others installed as well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="+", help="the first is checked")
    parser.add_argument(NO_EXAMPLE, action="store_true", dest="no_example")
    asked = parser.parse_args()
    package, *_ = wanted = asked.packages
    os.environ.pop("PYTHONPATH", None)  # has led here, and is nothing to examples
    faults = check_installed(wanted)
    for name in wanted:
        faults += check_import(name.replace("-", "_"))
    if not asked.no_example:
        faults += check_example(Path.cwd() / "packages" / package / "README.md")
    for fault in faults:
        sys.stderr.write(f"{package}: {fault}\n")
    return 1 if faults else 0


def check_installed(wanted: list[str]) -> list[str]:
    """Compares the packages of this repository that are installed with ``wanted``.

    An installer leaves ``direct_url.json`` (PEP 610) with what it was given as a file,
    and not with what it took from an index, where the names may be somebody else's.
    """
    ours = {one.metadata["Name"]: one for one in distributions()}
    ours = {name: one for name, one in ours.items() if name.startswith("tw-")}
    faults = []
    if ours.keys() != set(wanted):
        got = f"must hold exactly {sorted(wanted)}; got {sorted(ours)}"
        faults.append(f"its environment {got}.")
    from_index = [n for n, one in ours.items() if not one.read_text("direct_url.json")]
    if from_index:
        told = "name their files in the README's command"
        faults.append(f"an index was asked for {sorted(from_index)}; {told}.")
    return faults


def check_import(module: str) -> list[str]:
    """Imports a module in new interpreters; the fastest of them counts."""
    command = [sys.executable, "-I", "-c", _IMPORT.format(module=module)]
    runs = [json.loads(subprocess.check_output(command)) for _ in range(ATTEMPTS)]
    seconds = min(seconds for seconds, _ in runs)
    sys.stdout.write(f"{module}: imported in {seconds * 1000:.1f} ms\n")
    faults = []
    if seconds >= IMPORT_LIMIT_S:
        faults.append(f"{module} takes {seconds:.3f} s to import; the limit is 0.1 s.")
    if any(loaded for _, loaded in runs):
        faults.append(f"importing {module} imports TensorFlow.")
    return faults


def check_example(readme: Path) -> list[str]:
    """Runs the examples of a README in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            run_to_its_end(command, deadline_s=EXAMPLE_DEADLINE_S, cwd=Path(folder))
            for command in example_commands(readme, Path(folder))
        ]
    if not runs:
        return ["the README has no block ```python; it must have an example."]
    sys.stdout.write(f"{readme.parent.name}: {len(runs)} examples were run\n")
    return [f"the README's example failed:\n{said}" for status, said in runs if status]


def example_commands(readme: Path, folder: Path) -> list[list[str]]:
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


if __name__ == "__main__":
    sys.exit(main())
