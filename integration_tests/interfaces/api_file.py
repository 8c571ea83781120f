"""The frozen interface file of a package, and how it differs from the code."""

import difflib
from collections.abc import Sequence

NAME = "api.txt"


def render(package: str, lines: Sequence[str]) -> str:
    """Writes the file of ``package``."""
    head = (
        f"# The public interface of {package}, a line a name. Made from the code by\n"
        f'#   nox -s "api({package})" -- --write\n'
    )
    return head + "".join(f"{line}\n" for line in lines)


def parse(text: str) -> list[str]:
    """Reads the lines of a file, comments and empty ones left out."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def difference(frozen: Sequence[str], code: Sequence[str]) -> str:
    """Shows what the file and the code do not share, or nothing where they agree.

    Returns:
      Lines that only the file has with ``-`` before them, those of the code with ``+``.
    """
    compared = difflib.unified_diff(frozen, code, n=0, lineterm="")
    changed = [line for line in compared if line[0] in "-+"]
    return "\n".join(f"{line[0]} {line[1:]}" for line in changed[2:])  # after the head
