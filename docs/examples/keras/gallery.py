"""Shared by the gallery's programs: options, devices, noise, the plain program.

A comment on each line that is not plain Keras gives its plain-Keras form: ``# plain
Keras: make_model()``, or ``# plain Keras: no such line``. With ``--plain`` a program
runs with these forms.
"""

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--towers", type=int, default=2, help="number of towers")
parser.add_argument("--epochs", type=int, help="default: the program's own")
parser.add_argument("--seed", type=int, default=0, help="of all random numbers")
parser.add_argument("--float64", action="store_true", help="compute in float64")
parser.add_argument("--plain", action="store_true", help="one device, plain Keras")
if Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parent:
    parser.parse_args()  # --help and wrong options need no Keras.

import keras
import numpy as np
import tensorflow as tf

import tw_core

_MARK = "# plain Keras: "
_NO_LINE = "no such line"
_VALUE = re.compile(r"= .*$")


def devices(towers):
    """Returns that many devices, GPUs if there are any."""
    return tw_core.devices.available_devices()[:towers]


def normal_rows(seeds, step, width, dtype):
    """Returns [rows, width] normal numbers, which depend on a row's seed and the step.

    A row's numbers do not depend on other rows or on the tower, so that a batch over
    towers has the same noise as on one device.
    """
    step = tf.cast(step, seeds.dtype)
    return tf.map_fn(
        lambda seed: tf.random.stateless_normal([width], [seed, step], dtype=dtype),
        seeds,
        fn_output_signature=tf.TensorSpec([width], dtype),
    )


def reducers():
    """Returns, by name, reducers that send less than the gradients."""
    from tw_reduce.compression import error_feedback, int8, power_sgd, sign, top_k

    return {
        "rank 4": power_sgd(rank=4),
        "int8": error_feedback(int8()),
        "sign": error_feedback(sign()),
        "top 2 %": error_feedback(top_k(0.02)),
    }


def marked_lines(path):
    """Lists the lines of a program that are not plain Keras, without the marks."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [line.partition(_MARK)[0].strip() for line in lines if _MARK in line]


def plain_source(path):
    """Returns the source of the program in plain Keras."""
    kept = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        code, _, plain = line.partition(_MARK)
        if plain != _NO_LINE:
            kept.append(_VALUE.sub(f"= {plain}", code.rstrip()) if plain else line)
    return "\n".join(kept)


def plain_main(path) -> Callable[..., Any]:
    """Returns ``main`` of the program in plain Keras."""
    names = {"__name__": "plain", "__file__": str(path)}
    exec(compile(plain_source(path), str(path), "exec"), names)
    return names["main"]


def use_float64():
    """Makes models and losses created from now on compute in float64."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


def train_over_ranks(main):
    """Makes a program train over the processes that tw-launch started; returns them."""
    import tw_ranks

    group = tw_ranks.join()
    names = main.__globals__
    over_ranks = {"group": group, "data": "shared"}
    names["TowerModel"] = functools.partial(names["TowerModel"], **over_ranks)
    return group


def run(main, path):
    """Runs a program with the options of the command line."""
    options = parser.parse_args()
    group = None
    if "TF_CONFIG" in os.environ and not options.plain:
        group = train_over_ranks(main)
    if options.towers < 1:
        parser.error(f"--towers must be at least 1; got {options.towers}")
    if not tf.config.list_physical_devices("GPU"):
        tw_core.use_logical_cpus(options.towers)
    if options.float64:
        use_float64()
    given = {} if options.epochs is None else {"epochs": options.epochs}
    used = plain_main(path) if options.plain else main
    history = used(options.towers, seed=options.seed, **given)
    where = "one device, plain Keras" if options.plain else f"{options.towers} towers"
    if group is not None:
        where += f" in each of {group.size} processes"
        group.leave()
        if group.rank > 0:
            return
    print(f"After {len(next(iter(history.values())))} epochs on {where}:")
    for name, values in history.items():
        first, last = np.float64(values[0]), np.float64(values[-1])
        print(f"  {name:<22} {first:.6g} -> {last:.6g}")
