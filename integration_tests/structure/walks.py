"""Counts the way that a gradient takes through the packages' files.

Run by ``nox -s structure``. A profile function follows every call of our code while one
step is built (and, where a step loads data, run): the files that it passes, the calls,
and how often a call leads from one file to another. The wrapper that names a public
function is no stop on the way: a reader goes from the call to the function.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if __name__ == "__main__":  # Help and wrong options do not wait for TensorFlow.
    argparse.ArgumentParser(description=__doc__).parse_args()

import numpy as np
import tensorflow as tf

import tw_ampopt
import tw_builders
import tw_core.checks
import tw_reduce
import tw_rlload
import tw_syncrep

v1 = tf.compat.v1
OURS = {
    str(Path(module.__file__).parent)
    for module in (
        *(tw_ampopt, tw_builders, tw_core, tw_reduce, tw_rlload, tw_syncrep),
    )
}
WRAPPERS = str(Path(tw_core.checks.__file__))
# On both sides of the packs' thresholds, 4,096 and 16,384 elements.
SHAPES = ([40, 200], [200], [200, 100], [100], [100, 1])


@dataclass
class Walk:
    """What was passed on the way.

    Attributes:
      files: of our packages.
      calls: of our functions.
      changes: calls from one of our files into another.
    """

    files: set[str] = field(default_factory=set)
    calls: int = 0
    changes: int = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Counts a call; for ``sys.setprofile``."""
        if event != "call" or not _is_ours(frame):
            return
        file = frame.f_code.co_filename
        self.calls += 1
        self.files.add(file)
        caller = _calling_file(frame)
        self.changes += caller is not None and caller != file


def _is_ours(frame: FrameType) -> bool:
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if name == "<module>" or (file == WRAPPERS and name == "wrapper"):
        return False
    return any(file.startswith(folder) for folder in OURS)


def _calling_file(frame: FrameType) -> str | None:
    """Finds the next file of ours down the stack, past TensorFlow's own."""
    outer = frame.f_back
    while outer is not None:
        if _is_ours(outer):
            return outer.f_code.co_filename
        outer = outer.f_back
    return None


@contextmanager
def followed() -> Iterator[Walk]:
    """Counts what is called inside."""
    walk = Walk()
    sys.setprofile(walk)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def variables_of_tower() -> list[tf.Variable]:
    """Makes the model's variables in a session graph."""
    return [v1.get_variable(f"v{n}", shape) for n, shape in enumerate(SHAPES)]


def loss_of(variables: list[Any]) -> tf.Tensor:
    """Makes a loss of which every variable has a gradient."""
    return tf.add_n([tf.reduce_sum(tf.square(variable)) for variable in variables])


def replicated(devices: list[str]) -> Walk:
    """Builds a replicated step in a session graph."""
    with tf.Graph().as_default():
        builder = tw_builders.SyncMultiGPUReplicatedBuilder(devices, True, "gpu")

        def tower() -> list[tuple[tf.Tensor, tf.Variable]]:
            variables = variables_of_tower()
            grads = tf.gradients(loss_of(variables), variables)
            return list(zip(grads, variables, strict=True))

        grads = builder.call_for_each_tower(tower)
        with followed() as walk:
            builder.build(grads, lambda: v1.train.AdamOptimizer(0.1))
    return walk


def function(devices: list[str]) -> Walk:
    """Traces reduction and updates in a ``tf.function``."""
    towers = tw_core.towers(devices)
    replicas = tw_core.replicate(towers, lambda _: Model())
    lists = [replica.parts for replica in replicas]
    optimizers = tw_builders.make_optimizers(
        towers, lambda: v1.train.AdamOptimizer(0.1), lists
    )
    all_reduce = tw_reduce.mean(
        tw_reduce.packed(
            tw_reduce.broadcast(partial(tw_reduce.sum_balanced, devices=devices))
        )
    )
    walks = []

    @tf.function(autograph=False)
    def step() -> None:
        grads = [tf.gradients(loss_of(parts), parts) for parts in lists]
        with followed() as walk:
            tw_builders.apply_gradients(towers, all_reduce(grads), lists, optimizers)
        walks.append(walk)

    step.get_concrete_function()
    return walks[-1]


class Model(tf.Module):
    """The model's variables outside of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [tf.Variable(tf.ones(shape)) for shape in SHAPES]


def ampopt(devices: list[str]) -> Walk:
    """Builds ``apply_updates`` of two towers that accumulate and scale their losses."""
    with tf.Graph().as_default():
        optimizer = tw_ampopt.Optimizer(
            minibatch_multiplier=4, use_loss_scaling=True, learning_rate=0.1
        )
        for k, device in enumerate(devices):
            with tf.device(device), v1.variable_scope(f"tower{k}"):
                variables = variables_of_tower()
                optimizer.register_gradients(loss_of(variables), variables)
        with followed() as walk:
            optimizer.apply_updates()
    return walk


def syncrep(devices: list[str]) -> Walk:
    """Builds ``apply_gradients`` of one replica of two, with one parameter server."""
    del devices
    with tf.Graph().as_default():
        with tf.device("/job:ps/task:0"):
            variables = variables_of_tower()
            step = v1.train.get_or_create_global_step()
        optimizer = tw_syncrep.SyncReplicasOptimizer(
            v1.train.AdamOptimizer(0.1), replicas_to_aggregate=2
        )
        with tf.device("/job:worker/task:0"):
            pairs = optimizer.compute_gradients(loss_of(variables), variables)
            with followed() as walk:
                optimizer.apply_gradients(pairs, global_step=step)
    return walk


class Policy:
    """What tw-rlload trains."""

    def __init__(self, inputs: list[tf.Tensor]) -> None:
        self.variables = variables_of_tower()
        self.loss = loss_of(self.variables) + tf.reduce_mean(inputs[0])

    def gradients(self, optimizer: Any) -> list[tuple[Any, tf.Variable]]:
        """Returns the pairs of one tower."""
        return optimizer.compute_gradients(self.loss, self.variables)  # type: ignore[no-any-return]


def rlload(devices: list[str]) -> tuple[Walk, Walk]:
    """Loads rows, and runs a step on them for the first time."""
    config = v1.ConfigProto(device_count={"CPU": 8})
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        columns = [v1.placeholder(tf.float32, [None, 3], "x")]
        optimizer = tw_rlload.LocalSyncParallelOptimizer(
            v1.train.AdamOptimizer(0.1), devices, columns, [], 8, Policy
        )
        session.run(v1.global_variables_initializer())
        with followed() as load:
            optimizer.load_data(session, [np.ones([32, 3], np.float32)], [])
        with followed() as step:
            optimizer.optimize(session, 0)
    return load, step


WALKS: dict[str, Callable[[list[str]], Any]] = {
    "replicated, session graph": replicated,
    "`tf.function` apply": function,
    "ampopt `apply_updates`": ampopt,
    "syncrep `apply_gradients`": syncrep,
    "rlload": rlload,
}


def main() -> None:
    """Prints the table of this checkout."""
    devices = tw_core.use_logical_cpus(8)[:2]
    print("| way | files | calls | changes of file |")
    print("|---|---|---|---|")
    for name, follow in WALKS.items():
        follow(devices)  # what is imported or cached at first use is no part of the way
        walks = follow(devices)
        for walk, part in zip(
            walks if isinstance(walks, tuple) else (walks,),
            (": load", ": step") if isinstance(walks, tuple) else ("",),
            strict=True,
        ):
            print(
                f"| {name}{part} | {len(walk.files)} | {walk.calls} | {walk.changes} |"
            )


if __name__ == "__main__":
    main()
