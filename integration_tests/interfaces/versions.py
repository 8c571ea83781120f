"""Which version a change of the interface demands, and what a bump makes of one.

Before 1.0 a name that changes or goes raises the minor version, from 1.0 on the major
one; a name that comes raises the patch version at least.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from packaging.version import Version

PARTS = ("patch", "minor", "major")


@dataclass(frozen=True)
class InterfaceChange:
    """What became of an interface since a release.

    Attributes:
      removed: lines that are no longer there; of a changed one its older form.
      added: lines that were not there; of a changed one its newer form.
    """

    removed: tuple[str, ...]
    added: tuple[str, ...]


def interface_change(before: Iterable[str], after: Iterable[str]) -> InterfaceChange:
    """Compares the lines of a release with those of now."""
    old, new = list(before), list(after)
    return InterfaceChange(
        removed=tuple(line for line in old if line not in set(new)),
        added=tuple(line for line in new if line not in set(old)),
    )


def bump(version: Version, part: str) -> Version:
    """Raises one part of a version and clears those behind it.

    Raises:
      ValueError: an unknown part.
    """
    major, minor, patch = version.release[:3]
    raised = {
        "patch": (major, minor, patch + 1),
        "minor": (major, minor + 1, 0),
        "major": (major + 1, 0, 0),
    }
    if part not in raised:
        raise ValueError(f"bump: unknown part {part!r}; use one of {', '.join(PARTS)}.")
    return Version(".".join(map(str, raised[part])))


def due_part(last: Version, change: InterfaceChange) -> str:
    """Returns the part that ``change`` raises at least; empty for no change."""
    if change.removed:
        return "major" if last.major else "minor"
    return "patch" if change.added else ""


def due_version(last: Version, change: InterfaceChange) -> Version:
    """Returns the lowest version that may carry ``change``; ``last`` for none."""
    part = due_part(last, change)
    return bump(last, part) if part else last


def complaint(last: Version, now: Version, change: InterfaceChange) -> str:
    """Says what is wrong with the version ``now``, or nothing where it will do."""
    due = due_version(last, change)
    if now >= due:
        return ""
    shown = [*(f"- {line}" for line in change.removed)]
    shown += [f"+ {line}" for line in change.added]
    what = "changes or removes" if change.removed else "adds to"
    if not shown:
        return f"the version is {now}, which is below the last release, {last}."
    return "\n".join(
        [
            *shown,
            f"This {what} what {last} promised, so that the version must be {due} or "
            f"higher; got {now}.",
        ]
    )
