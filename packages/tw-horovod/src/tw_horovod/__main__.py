"""Runs a program that imports ``horovod`` on ``tw_horovod``.

python -m tw_horovod train.py --epochs 3
python -m tw_horovod -m package.train --epochs 3

For launchers other than ``tw-launch --horovod``, which needs no such prefix.
"""

import os
import runpy
import sys
from pathlib import Path

from tw_horovod._unmodified import python_path


def main() -> None:
    """Puts Horovod's name on the path of this process and its children, and runs it."""
    is_module = sys.argv[1:2] == ["-m"]
    del sys.argv[: 1 + is_module]
    if not sys.argv:
        sys.exit("usage: python -m tw_horovod [-m MODULE | FILE] [ARGUMENT ...]")
    names = python_path()
    path = filter(None, (names, os.environ.get("PYTHONPATH")))
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    # As for Python itself: "" of -m, or the program's folder, comes first.
    if not sys.flags.safe_path:
        own = Path.cwd() if is_module else Path(sys.argv[0]).resolve().parent
        sys.path[0] = str(own)
    sys.path.insert(int(not sys.flags.safe_path), names)
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
