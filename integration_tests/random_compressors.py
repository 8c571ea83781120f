"""Compressors of one's own, made at random, and a model of them in NumPy.

Everything is a small whole number, so that sums are exact in each dtype.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import tensorflow as tf

from tw_core.testing import CPUS
from tw_reduce import ReducerState
from tw_reduce.compression import error_feedback, from_rows, to_row

DTYPES = ("int32", "int64", "float16", "bfloat16", "float32", "float64")
OCTETS = ("int8", "uint8")  # which only towers add, and to_row takes
NARROW = ("int32", "float16", "bfloat16", "float32", *OCTETS)  # fit to_row
SHAPES = [(3, 4), (5,), (2, 3, 2), (1, 1), (10, 6)]  # of variables
_LIMIT, _ROWS = 8, 7


@dataclass(frozen=True)
class _Piece:
    """Some elements of a tensor, limited, in a shape and dtype."""

    first: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def limits(self) -> tuple[int, int]:
        return (0 if self.dtype.startswith("u") else -_LIMIT), _LIMIT

    def take(self, flat: tf.Tensor) -> tf.Tensor:
        own = tf.clip_by_value(
            flat[self.first : self.first + self.size], *self.limits()
        )
        return tf.cast(tf.reshape(own, self.shape), self.dtype)

    def place(self, values: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
        flat = tf.cast(tf.reshape(values, [-1]), like.dtype)
        after = like.shape.num_elements() - self.first - self.size
        return tf.reshape(tf.pad(flat, [[self.first, after]]), like.shape)

    def approximate(self, full: np.ndarray) -> np.ndarray:
        result = np.zeros(full.size)
        own = slice(self.first, self.first + self.size)
        result[own] = np.clip(full.ravel()[own], *self.limits())
        return result.reshape(full.shape)


def _piece(random: Random, size: int, dtypes: Sequence[str]) -> _Piece:
    shapes: list[tuple[int, ...]] = [(), (1,), (0,), (2, 3), (4, 1, 2), (size,), (2, 0)]
    shape = random.choice([own for own in shapes if np.prod(own) <= size])
    first = random.randint(0, size - int(np.prod(shape)))
    return _Piece(first, shape, random.choice(dtypes))


def _plan(seed: Any, shape: Sequence[int]) -> list[tuple[str, list[_Piece], list[int]]]:
    """Returns each part's kind, pieces, and indices if it is sparse."""
    random, size = Random(f"{seed} {tuple(shape)}"), int(np.prod(shape))
    dtypes, parts = (DTYPES if "ranks" in str(seed) else (*DTYPES, *OCTETS)), []
    for _ in range(random.randint(0, 4)):
        kind, places = random.choice(["dense", "sparse", "row"]), []
        if kind == "dense":
            pieces = [_piece(random, size, dtypes)]
        elif kind == "row":
            pieces = [_piece(random, size, NARROW) for _ in range(random.randint(0, 3))]
        else:
            width = random.randint(0, min(3, size))
            rows = random.choice([n for n in (0, 1, 1, 2, 3) if n * width <= size])
            pieces = [_Piece(0, (rows, width), random.choice(dtypes))]
            places = random.sample(range(_ROWS), rows)
        parts.append((kind, pieces, places))
    return parts


def compressor(seed: Any) -> Callable[[tf.Tensor], Any]:
    """Makes a compressor that sends other parts of each shape of tensor."""

    def compress(tensor: tf.Tensor) -> Any:
        flat, plan = tf.reshape(tensor, [-1]), _plan(seed, tensor.shape)
        sent: list[Any] = []
        for kind, pieces, places in plan:
            values = [own.take(flat) for own in pieces]
            if kind == "sparse":
                shape = tf.constant([_ROWS, pieces[0].shape[1]], tf.int64)
                indices = tf.constant(places, tf.int64, [len(places)])
                sent.append(tf.IndexedSlices(values[0], indices, shape))
            else:
                sent.append(to_row(values) if kind == "row" else values[0])

        def read(*sums: Any) -> tf.Tensor:
            total = tf.zeros_like(tensor)
            for (kind, pieces, places), part in zip(plan, sums, strict=True):
                values = [part]
                if kind == "row":
                    specs = [tf.TensorSpec(own.shape, own.dtype) for own in pieces]
                    values = [
                        tf.reduce_sum(tf.cast(own, tensor.dtype), 0)
                        for own in from_rows(part, specs)
                    ]
                elif kind == "sparse":
                    rows = tf.cast(part.values, tensor.dtype)
                    table = tf.math.unsorted_segment_sum(rows, part.indices, _ROWS)
                    values = [tf.gather(table, tf.constant(places, tf.int32))]
                for own, value in zip(pieces, values, strict=True):
                    total += own.place(value, tensor)
            return total

        return sent, read

    return compress


def approximate(seed: Any, full: np.ndarray) -> np.ndarray:
    """The model of the sum of a compressor's parts."""
    result = np.zeros(full.shape)
    for _, pieces, _ in _plan(seed, full.shape):
        for own in pieces:
            result += own.approximate(full)
    return result


def gradients(seed: Any, step: int, tower: int) -> list[np.ndarray]:
    """A tower's gradients, counted over all ranks."""
    random = np.random.default_rng([Random(f"{seed}").getrandbits(32), step, tower])
    return [random.integers(-4, 5, shape).astype(np.float32) for shape in SHAPES]


def modelled(seed: Any, num_towers: int, steps: int) -> list[list[np.ndarray]]:
    """Returns each step's sums."""
    errors = [[np.zeros(shape) for shape in SHAPES] for _ in range(num_towers)]
    results = []
    for step in range(steps):
        sums = [np.zeros(shape) for shape in SHAPES]
        for tower, own in enumerate(errors):
            for n, grad in enumerate(gradients(seed, step, tower)):
                full = grad + own[n]
                sent = full if grad.ndim < 2 else approximate(seed, full)
                own[n], sums[n] = full - sent, sums[n] + sent
        results.append(sums)
    return results


def reduced(
    seed: Any,
    devices: Sequence[str],
    steps: int,
    *,
    dtype: str = "float32",
    first: int = 0,
    add: Any = None,
    wrap: Callable[[Any], Any] | None = None,
) -> list[Any]:
    """Returns each step's sums on each of these towers.

    ``first`` is the number of tower 0 among all ranks'; ``wrap`` makes a function of a
    step, None builds a session graph.
    """
    with nullcontext() if wrap else tf.Graph().as_default():
        variables = []
        for device in devices:
            with tf.device(device):
                variables.append([tf.Variable(tf.zeros(s, dtype)) for s in SHAPES])
        reducer = error_feedback(compressor(seed), min_elements=0)
        state = ReducerState(reducer, variables, add=add)
        specs = [[tf.TensorSpec(shape, dtype) for shape in SHAPES] for _ in devices]
        run = wrap(state) if wrap else _in_session(state, specs)
        results = []
        for step in range(steps):
            towers = [gradients(seed, step, first + k) for k in range(len(devices))]
            if wrap:
                towers = [[tf.cast(own, dtype) for own in tower] for tower in towers]
            sums = tf.nest.map_structure(np.asarray, run(towers))
            results.append([[own.astype(np.float64) for own in row] for row in sums])
    return results


def _in_session(fn: Any, specs: Any) -> Callable[..., Any]:
    v1 = tf.compat.v1
    fed = tf.nest.map_structure(lambda own: v1.placeholder(own.dtype, own.shape), specs)
    sums = fn(fed)
    session = v1.Session(config=v1.ConfigProto(device_count={"CPU": len(CPUS)}))
    session.run(v1.global_variables_initializer())

    def run(towers: Any) -> Any:
        flat = zip(tf.nest.flatten(fed), tf.nest.flatten(towers), strict=True)
        return session.run(sums, dict(flat))

    return run
