"""The command line of the sessions; not of ``pieces``, which has nothing installed."""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from interfaces import api, index, release, siblings


def main(words: list[str] | None = None) -> int:
    """Runs a session from the root; returns 1, and says why, where it refuses."""
    parser = argparse.ArgumentParser(prog="interfaces", description=__doc__)
    sessions = parser.add_subparsers(dest="session", required=True)
    package = ("package", {"help": "such as tw-core"})
    some = ("packages", {"nargs": "*", "help": "names of packages; all by default"})
    write = ("--write", {"action": "store_true", "help": "rewrite the files"})
    version = ("--version", {"default": "", "help": "give it to all packages"})
    into = ("into", {"type": Path, "help": "folder for the results"})
    address = ("address", {"help": "of the repository, as https://HOST/OWNER/NAME"})
    several = (
        "packages",
        {"nargs": "+", "help": "names of packages; all; or all and a version"},
    )
    known: tuple[tuple[Any, ...], ...] = (
        ("api", api.run, some, write, version),
        ("compat", partial(siblings.run, siblings.compat), package, into),
        ("forward", partial(siblings.run, siblings.forward), package, into),
        ("released", siblings.released, into),
        ("index", index.run, package, address, into),
        ("release", release.run, several),
    )
    for name, run, *arguments in known:
        own = sessions.add_parser(name)
        own.set_defaults(run=run)
        for argument, options in arguments:
            own.add_argument(argument, **options)
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
