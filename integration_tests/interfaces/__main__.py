"""The command line of the sessions; ``pieces`` has its own, as nothing is there."""

import argparse
import sys
from functools import partial
from pathlib import Path

from interfaces import api, release, siblings


def main(words: list[str] | None = None) -> int:
    """Runs a session from the root; returns 1, and says why, where it refuses."""
    parser = argparse.ArgumentParser(prog="interfaces", description=__doc__)
    sessions = parser.add_subparsers(dest="session", required=True)

    own = sessions.add_parser("api", description=api.__doc__)
    own.add_argument("package")
    own.add_argument("--write", action="store_true", help="rewrite the file")
    own.set_defaults(run=api.run)

    for planner in (siblings.compat, siblings.forward):
        own = sessions.add_parser(planner.__name__, description=planner.__doc__)
        own.add_argument("package")
        own.add_argument("into", type=Path, help="folder for runs.json and wheels")
        own.set_defaults(run=partial(siblings.run, planner))

    own = sessions.add_parser("released", description=siblings.released.__doc__)
    own.add_argument("into", type=Path, help="a new folder for the tree")
    own.set_defaults(run=siblings.released)

    own = sessions.add_parser("release", description=release.__doc__)
    own.add_argument("--nox", required=True, help="a Python that has nox")
    own.add_argument("packages", nargs="+", help="names of packages, or all")
    own.set_defaults(run=release.run)

    own = sessions.add_parser("tagged", description=release.build_tagged.__doc__)
    own.add_argument("tag", help="of a release, as tw-core-v0.2.0")
    own.set_defaults(run=release.build_tagged)

    asked = vars(parser.parse_args(words))
    session, run = asked.pop("session"), asked.pop("run")
    try:
        run(Path.cwd(), **asked)
    except (RuntimeError, ValueError) as error:
        sys.stderr.write(f"{session}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
