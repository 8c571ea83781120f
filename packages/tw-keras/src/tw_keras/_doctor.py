"""This package's check and command, which ``tw-doctor`` finds by entry points."""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import tw_keras
from tw_core import use_logical_cpus


def checks(devices: Sequence[str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields the check's name and its function, which raises an error if it fails.

    ``devices``: the towers' devices, at least two.
    """
    yield "TowerModel", partial(_check_tower_model, devices)


def _check_tower_model(devices: Sequence[str]) -> None:
    import keras

    def make_model() -> Any:
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        return keras.Sequential([keras.Input([2]), dense])

    model = tw_keras.TowerModel(make_model, devices)
    model.compile(keras.optimizers.SGD(0.25), "mse")
    rows = 4 * len(devices)
    x = np.tile(np.eye(2, dtype=np.float32), (rows // 2, 1))
    model.fit(x, np.zeros([rows, 1], np.float32), batch_size=rows, verbose=0)
    # Half of the rows are for each weight, so the gradient of mean((w x)^2) is w.
    for k, tower in enumerate(model.towers):
        got = tower.get_weights()[0]
        if not np.allclose(got, 0.75, rtol=2.0**-9):  # float16's rounding, twice
            raise AssertionError(f"variable 0 of tower {k} is {got} instead of 0.75")


def model(arguments: Sequence[str]) -> int:
    """Runs ``tw-doctor model``; returns 0 if towers train as plain Keras, else 1."""
    parser = argparse.ArgumentParser(
        prog="tw-doctor model",
        description="Trains a Keras model plain and over towers, on GPUs if there are "
        "any, and says what differs and why. Exits with 1 if anything does. Defaults "
        "are in parentheses.",
    )
    name = "MODULE:FUNCTION"
    parser.add_argument("make_model", metavar=name, help="returns a model")
    parser.add_argument(
        "--data",
        metavar=name,
        help="returns batches, or a tuple of arrays (make_data of the model's module)",
    )
    parser.add_argument(
        "--compile",
        metavar=name,
        help="compiles the model that it is given (make_model compiles it)",
    )
    towers, steps = "number of towers (2)", "number of batches (3)"
    parser.add_argument("--towers", metavar="K", type=int, default=2, help=towers)
    parser.add_argument("--steps", metavar="N", type=int, default=3, help=steps)
    options = parser.parse_args(arguments)
    for name in ("towers", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"argument --{name}: must be 1 or more")
    import tensorflow as tf

    gpus = len(tf.config.list_physical_devices("GPU"))
    devices: Any = [f"/gpu:{k % gpus}" for k in range(options.towers) if gpus]
    devices = devices or use_logical_cpus(options.towers)  # before devices are used
    sys.path.insert(0, "")  # A command's path lacks the current folder.
    data = options.data or f"{options.make_model.partition(':')[0]}:make_data"
    names = [options.make_model, data, *filter(None, [options.compile])]
    try:
        make_model, make_data, *compiling = map(_find, names)
    except LookupError as error:
        parser.error(str(error))
    result = tw_keras.compare(
        *(make_model, make_data(), devices),
        compile=compiling[0] if compiling else None,
        steps=options.steps,
    )
    print(result)
    return 0 if result.equal else 1


def _find(name: str) -> Any:
    """Finds the function ``module:function``."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except (ModuleNotFoundError, ValueError) as error:
        raise LookupError(f"{name!r} must be module:function; {error}") from None
    if not callable(found):
        raise LookupError(f"{name!r}: the module {module} has no such function")
    return found
