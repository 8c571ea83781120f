"""TensorFlow's own tests of ``SyncReplicasOptimizer`` and ``replica_device_setter``.

``nox -s "clients(tensorflow_tests)" -- CHECKOUT`` runs ``sync_replicas_optimizer_test.
py`` and ``device_setter_test.py`` of a checkout's ``tensorflow/python/training``,
unchanged, each test in fresh processes. These names are replaced first:

- ``training.SyncReplicasOptimizer`` of ``tensorflow.python.training``, by
  ``tw_syncrep.SyncReplicasOptimizer``;
- ``device_setter.replica_device_setter`` of the same package, by
  ``tw_core.replica_device_setter``;
- ``training.MonitoredTrainingSession``, by ``tw_syncrep.training_session``, in a second
  process of each test of the optimizer; the first leaves TensorFlow's;
- ``tf.Graph.get_tensor_by_name``, for variables alone: tests look them up as "v0:0".
  That is the value of a reference variable, which these packages refuse, but the handle
  of a resource variable; here it is the value of either.

Tests run in version 1 mode, as most require, with resource variables. A test fails if
it uses neither replacement. The tests that fail must be in ``tensorflow_tests.toml``,
with a reason. Without a checkout no test runs.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import foreign_tests

FILES = (
    "tensorflow/python/training/device_setter_test.py",
    "tensorflow/python/training/sync_replicas_optimizer_test.py",
)
DEADLINE_S = 300


def run(file: Path, name: str) -> tuple[str, str]:
    """Runs a test; returns its outcome and its output."""
    sessions = (False, True) if "SyncReplicas" in name else (False,)
    arguments = [(f"{file}::{name}", has_our_session) for has_our_session in sessions]
    return foreign_tests.run_apart(run_test, arguments, deadline_s=DEADLINE_S)


def run_test(path: Path, test: str, has_our_session: bool) -> None:
    """In a process of its own: replaces the names, and runs a test."""
    import tensorflow as tf

    import tw_core
    import tw_syncrep

    logging.getLogger("tensorflow").setLevel("ERROR")  # not that version 1 is old
    tf.compat.v1.disable_v2_behavior()
    tf.compat.v1.enable_resource_variables()
    package = "tensorflow.python.training"
    training = importlib.import_module(f"{package}.training")
    device_setter = importlib.import_module(f"{package}.device_setter")
    used: set[str] = set()

    def noted(replacement: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            used.add(replacement.__name__)
            return replacement(*arguments, **options)

        return call

    training.SyncReplicasOptimizer = noted(tw_syncrep.SyncReplicasOptimizer)
    device_setter.replica_device_setter = noted(tw_core.replica_device_setter)
    if has_our_session:
        training.MonitoredTrainingSession = tw_syncrep.training_session
    by_name = tf.Graph.get_tensor_by_name
    tf.Graph.get_tensor_by_name = lambda *own: _value_of(*own, by_name(*own))
    # The file may be in a package named tensorflow, which is not imported from there.
    foreign_tests.run_test(path, test, "--import-mode=importlib")
    if not used:
        path.write_text(f"unused\n{path.read_text()}")
    os._exit(0)  # without waiting for sessions and servers, which tests leave open


def _value_of(graph: Any, name: str, tensor: Any) -> Any:
    """Returns the variable whose handle a tensor is, or else the tensor."""
    collections = ("variables", "local_variables")
    known = [v for key in collections for v in graph.get_collection(key)]
    return next((v for v in known if v.handle is tensor), tensor)


if __name__ == "__main__":
    deviations = Path(__file__).with_suffix(".toml")
    sys.exit(foreign_tests.main("TensorFlow", FILES, run, deviations=deviations))
