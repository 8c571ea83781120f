"""Keras in float64, and casts from it to narrower floats in graphs that we build."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import keras
import tensorflow as tf

_NARROW = {"float32", "float16", "bfloat16"}
# A loss scale is computed in float32, and what multiplies by it divides by it.
_EXACT = {("state.py", "scale")}


@contextmanager
def float64() -> Iterator[None]:
    """What Keras adds up in losses and metrics is of this dtype, too.

    The policy of layers is set as well: where none is, the first layer keeps the
    float type that it finds, for every layer of the process that is made later.
    """
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


@contextmanager
def narrow_casts() -> Iterator[list[str]]:
    """Lists the places in our code that cast floats from or to float64, while open."""
    found: list[str] = []
    create = tf.Graph._create_op_internal

    def create_and_look(graph, *arguments, **options):  # type: ignore[no-untyped-def]
        op = create(graph, *arguments, **options)
        if op.type == "Cast":
            ends = {tf.as_dtype(op.get_attr(end)).name for end in ("SrcT", "DstT")}
            if "float64" in ends and ends & _NARROW and (place := _place()):
                found.append(place)
        return op

    tf.Graph._create_op_internal = create_and_look
    try:
        yield found
    finally:
        tf.Graph._create_op_internal = create


def _place() -> str:
    """Names the innermost function of ours; "" if it called Keras or an optimizer."""
    for frame in reversed(traceback.extract_stack()):
        path = frame.filename
        if "/keras/src/" in path or "/tensorflow/python/training/" in path:
            return ""
        if "/tw_" in path:
            is_exact = (path.rpartition("/")[2], frame.name) in _EXACT
            return "" if is_exact else f"{path}:{frame.lineno} {frame.name}"
    return ""
