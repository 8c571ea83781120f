"""The all-reduces of others, each as a function [K][N] -> [K][N] of sums or means."""

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import tensorflow as tf

Lists = list[list[Any]]


def cross_device_ops(ops: tf.distribute.CrossDeviceOps) -> Callable[[Lists], Lists]:
    """TensorFlow's own reductions, on the values that its strategies give them."""
    return partial(_batch_reduce, ops)


def _batch_reduce(ops: tf.distribute.CrossDeviceOps, grads: Lists) -> Lists:
    values = importlib.import_module("tensorflow.python.distribute.values")
    pairs = [(values.PerReplica(column),) * 2 for column in zip(*grads, strict=True)]
    reduced = ops.batch_reduce(tf.distribute.ReduceOp.SUM, pairs)
    return [[mirrored.values[k] for mirrored in reduced] for k in range(len(grads))]


def tensorpack_utils() -> ModuleType | None:
    """Imports tensorpack's functions, or says why their rows are missing."""
    try:
        return importlib.import_module("tensorpack.graph_builder.utils")
    except Exception as error:  # whatever an old package does on a new TensorFlow
        print(f"tensorpack's rows are left out: it cannot be imported ({error!r}).")
        return None


def tensorpack_reducers(devices: list[str]) -> dict[str, Callable[[Lists], Lists]]:
    """tensorpack's replicated modes that run on CPUs, with its default average."""
    utils = tensorpack_utils()
    if utils is None:
        return {}
    found = {"tensorpack round robin, x 1/K": partial(_naive, utils, devices)}
    if len(devices) == 8:
        found["tensorpack packed hierarchical, x 1/K"] = partial(
            _hierarchical, utils, devices
        )
    return found


def _naive(utils: ModuleType, devices: list[str], grads: Lists) -> Lists:
    means = utils.allreduce_grads_naive(grads, devices=devices, average=True)
    return [means] * len(grads)


def _hierarchical(utils: ModuleType, devices: list[str], grads: Lists) -> Lists:
    packer = utils.GradientPacker(len(devices))
    can_pack = packer.compute_strategy(grads[0])
    packs = packer.pack_all(grads, devices) if can_pack else grads
    means = utils.allreduce_grads_hierarchical(packs, devices, average=True)
    return packer.unpack_all(means, devices) if can_pack else means
