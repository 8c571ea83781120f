"""Horovod's own tests of ``horovod.tensorflow``, on two processes of these packages.

``nox -s "clients(horovod_tests)" -- CHECKOUT`` runs its ``test/parallel/
test_tensorflow.py``, unchanged, each test in two fresh processes with the environment
of ``tw-launch --horovod``, and with Keras 2, for which they were written. Every failing
test must be in ``horovod_tests.toml``, with a reason. Without a checkout of Horovod
0.28 no test runs.
"""

import os
import sys
import types
from pathlib import Path
from typing import Any

from harness import foreign_tests
from harness.ports import find_free_ports

from tw_launch._launcher.messages import Start
from tw_launch._launcher.plan import Share, find_horovod, plan_tasks

FILES = ("test/parallel/test_tensorflow.py",)
RANKS = 2
DEADLINE_S = 600


def run(file: Path, name: str) -> tuple[str, str]:
    """Runs one test on all ranks; returns how it ended, and what was said."""
    addresses = tuple(f"127.0.0.1:{port}" for port in find_free_ports(RANKS))
    share = Share(0, RANKS, 0, (None,) * RANKS, horovod=find_horovod())
    plans = plan_tasks(share, Start(0, {"worker": addresses}, 0, "run"))
    arguments = [(f"{file}::{name}", dict(plan.variables)) for plan in plans]
    return foreign_tests.run_apart(run_rank, arguments, deadline_s=DEADLINE_S)


def run_rank(path: Path, test: str, variables: dict[str, str]) -> None:
    """In a process of its own: runs a test, and writes how it ended and was said."""
    os.environ.update(variables)
    # What a fresh Python reads of the environment, a forked one has to be told.
    sys.path.insert(0, find_horovod())
    import horovod.tensorflow as hvd

    _add_modules()
    hvd.init()  # Some tests leave it to those before them.
    foreign_tests.run_test(path, test)


def _add_modules() -> None:
    """Adds private modules of Horovod that its tests import, and what these use."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    def never(**_: Any) -> None:
        raise NotImplementedError("horovod.runner")

    contents = {
        "horovod.tensorflow.util": {"_executing_eagerly": tf.executing_eagerly},
        "horovod.runner": {},
        "horovod.runner.util": {},
        "horovod.runner.util.threads": {"in_thread": never},
        "cloudpickle": {},
        "mock": {},
    }
    hvd._executing_eagerly = tf.executing_eagerly
    for name, names in contents.items():
        module = types.ModuleType(name)
        vars(module).update(names, __path__=[])
        sys.modules[name] = module
    hvd.util = sys.modules["horovod.tensorflow.util"]


if __name__ == "__main__":
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    deviations = Path(__file__).with_suffix(".toml")
    sys.exit(
        foreign_tests.main("Horovod", FILES, run, deviations=deviations, may_skip=True)
    )
