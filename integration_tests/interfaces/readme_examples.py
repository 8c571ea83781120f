"""The Python examples of a README, as one command that runs them.

A README that starts its example with ``tw-launch`` has it run that way.
"""

import re
import sys
from pathlib import Path

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LAUNCH = re.compile(r"^    tw-launch (.*) -- python train\.py$", re.MULTILINE)


def example_command(readme: str, folder: Path) -> list[str]:
    """Makes the command for a README's examples.

    Args:
      readme: its text.
      folder: where the command will run; a program may be left there.

    Raises:
      ValueError: there is no example.
    """
    blocks = _BLOCK.findall(readme)
    if not blocks:
        raise ValueError("the README has no block ```python; it must have an example.")
    launched = _LAUNCH.search(readme)
    if not launched:
        return [sys.executable, "-c", _one_after_the_other(blocks)]
    program = folder / "train.py"
    program.write_text("\n".join(blocks))
    launch = [sys.executable, "-m", "tw_syncrep.launch", *launched[1].split()]
    return [*launch, "--", sys.executable, program.name]


def _one_after_the_other(blocks: list[str]) -> str:
    """Writes a program in which every block starts with nothing defined."""
    return "\n".join(
        f"exec(compile({block!r}, 'README block {i}', 'exec'), {{}})"
        for i, block in enumerate(blocks, start=1)
    )
