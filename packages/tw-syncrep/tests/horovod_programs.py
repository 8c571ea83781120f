"""What ranks do in tests of ``tw_syncrep.horovod``: functions, called by name."""

import functools
import json
import os
from typing import Any

import numpy as np
import tensorflow as tf
from rank_programs import answer

import tw_syncrep.horovod as hvd

v1 = tf.compat.v1


def run_rank(pipe: Any, options: dict[str, Any]) -> None:
    """Initializes, then calls what the test asks for until the pipe closes.

    Args:
      pipe: to the test.
      options: ``rank``, and ``cluster`` unless it is alone; ``v1`` disables TensorFlow
        2's behaviour, as such programs do.
    """
    os.environ.pop("TF_CONFIG", None)
    if "cluster" in options:
        task = {"type": "worker", "index": options["rank"]}
        told = {"cluster": {"worker": options["cluster"]}, "task": task}
        os.environ["TF_CONFIG"] = json.dumps(told)
    if options.get("v1"):
        v1.disable_v2_behavior()
    answer(pipe, hvd.init)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            break
        answer(pipe, functools.partial(globals()[name], *arguments))


def place() -> dict[str, Any]:
    """Initializes again, and tells all numbers."""
    hvd.init()
    names = ("size", "rank", "local_size", "local_rank", "cross_size", "cross_rank")
    numbers = {name: getattr(hvd, name)() for name in names}
    ops = ("size_op", "rank_op", "local_size_op", "local_rank_op")
    with v1.Session() if not tf.executing_eagerly() else tf.init_scope():
        numbers |= {name: run(lambda n=name: getattr(hvd, n)()) for name in ops}
    return numbers | {"is_homogeneous": hvd.is_homogeneous()}


def run(build: Any, mode: str = "eager", *arrays: np.ndarray) -> Any:
    """Builds something of tensors and runs it, as a function, eagerly or in a graph."""
    if mode == "session":
        with tf.Graph().as_default():
            fed = [v1.placeholder(array.dtype, array.shape) for array in arrays]
            built = build(*fed)
            with v1.Session() as session:
                return _plain(session.run(built, dict(zip(fed, arrays, strict=True))))
    if mode == "function":
        build = tf.function(build)
    return _plain(build(*(tf.constant(array) for array in arrays)))


def _plain(result: Any) -> Any:
    if hasattr(result, "indices"):
        return np.asarray(result.values), np.asarray(result.indices)
    if isinstance(result, list | tuple):
        return [_plain(item) for item in result]
    return np.asarray(result)


def call(
    name: str, mode: str, array: Any, options: dict[str, Any], times: int = 1
) -> Any:
    """Calls one of the collectives with a tensor, or a list of them.

    Options are its arguments; compression is given by its name.
    """
    function, options = getattr(hvd, name), dict(options)
    if "compression" in options:
        options["compression"] = getattr(hvd.Compression, options["compression"])
    for _ in range(times):
        if isinstance(array, list):
            result = run(lambda *own: function(list(own), **options), mode, *array)
        else:
            result = run(lambda own: function(own, **options), mode, array)
    return result


def gradient(
    name: str, mode: str, array: np.ndarray, upstream: Any, options: dict[str, Any]
) -> Any:
    """Returns the gradient of a collective, for that of its result."""

    def build(given: tf.Tensor, above: tf.Tensor) -> tf.Tensor:
        if mode == "session":
            result = getattr(hvd, name)(given, **options)
            result = result[0] if isinstance(result, tuple) else result
            return tf.gradients(result, given, above)[0]
        with tf.GradientTape() as tape:
            tape.watch(given)
            result = getattr(hvd, name)(given, **options)
            result = result[0] if isinstance(result, tuple) else result
        return tape.gradient(result, given, above)

    return run(build, mode, array, upstream)


def reduce_rows(
    mode: str, values: np.ndarray, indices: np.ndarray, op: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Reduces sparse rows, alone and with a dense tensor."""

    def build(values: tf.Tensor, indices: tf.Tensor) -> Any:
        slices = tf.IndexedSlices(values, indices, tf.constant([50, 2]))
        alone = hvd.allreduce(slices, op=op)
        [dense, grouped] = hvd.grouped_allreduce([tf.ones([2]), slices], op=hvd.Sum)
        return [alone, dense, grouped]

    return run(build, mode, values, indices)


def pass_around(obj: Any, root: int) -> Any:
    """Broadcasts and gathers objects, in between waits."""
    got = hvd.broadcast_object(obj, root)
    hvd.barrier()
    again = hvd.broadcast_object_fn(root)(obj)
    return got, again, hvd.allgather_object(obj)


def refused(statement: str) -> str:
    """Returns what a statement of ``hvd`` is refused with."""
    try:
        exec(statement, {"hvd": hvd, "tf": tf, "np": np})
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
