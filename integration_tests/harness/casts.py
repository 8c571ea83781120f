"""Finds casts between float64 and narrower floats in graphs that packages build."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

_NARROW = {"float32", "float16", "bfloat16"}
# A loss scale is computed in float32, and what multiplies by it divides by it.
_EXACT = {("state.py", "scale")}


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
