"""What the conformance cells train: linear losses of small whole numbers.

Sums and, over a power of two towers, means of such gradients are exact in every
dtype, so that a result can be demanded bit for bit. The oracle is NumPy.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

RATE, STEPS = 0.5, 2
DECAY = {"dense": 0.5, "sparse": 0.5}  # of the momentum; plain descent for the others
LOOKUPS = 4
FLAT_BELOW = 16_384  # bytes; 4,095 elements of float32 are fewer, 4,096 are not


@dataclass(frozen=True)
class Part:
    """One variable of a model."""

    shape: tuple[int, ...]  # of the variable
    dtype: str = "float32"  # its name
    # Whether rows of it are looked up, which makes its gradient sparse
    is_table: bool = False
    # The towers whose gradient has sizes that are not known while building
    unknown: range = range(0)


ALL, FIRST, OTHERS = range(8), range(1), range(1, 8)  # of the towers

# On both sides of what decides how a gradient travels: tw_reduce packs below 4,096
# elements, tw_ampopt up to 16,384. A pack of several, and gradients that stay alone.
KINDS = {
    "dense": (
        *(Part(()), Part((3,)), Part((5, 7))),
        *(Part((4_095,)), Part((64, 64)), Part((16_385,))),
    ),
    "sparse": (
        *(Part((6, 2), is_table=True), Part((5,), is_table=True)),
        Part((8_193, 2), is_table=True),
    ),
    "mixed": (
        Part((3,)),
        Part((6, 2), is_table=True),
        Part((2, 4), "float16"),
        Part((5, 3), "bfloat16", is_table=True),
        *(Part((2, 4)), Part((70, 70)), Part((8_193, 2), is_table=True)),
    ),
    "unknown": (
        *(Part((3,)), Part((2, 4))),
        *(Part((5, 7), unknown=where) for where in (ALL, FIRST, OTHERS)),
        *(Part((130, 130), unknown=where) for where in (ALL, FIRST, OTHERS)),
        *(Part((6, 2), is_table=True, unknown=where) for where in (ALL, OTHERS)),
    ),
    **{
        dtype: tuple(Part(shape, dtype) for shape in ((3,), (2, 4), (4_096,)))
        for dtype in ("float16", "bfloat16")
    },
}


def start(part: Part, tower: int) -> np.ndarray:
    """A variable's first value; replicas begin apart, so that the copying shows."""
    return np.full(part.shape, 1 + tower, tf.as_dtype(part.dtype).as_numpy_dtype)


@cache
def inputs(kind: str, num_towers: int, step: int) -> list[list[Any]]:
    """[K][N] factors of the variables; of a table, row numbers and factors."""
    random = np.random.default_rng([step, num_towers, *kind.encode()])
    return [[_input(part, random) for part in KINDS[kind]] for _ in range(num_towers)]


def _input(part: Part, random: np.random.Generator) -> Any:
    dtype = tf.as_dtype(part.dtype).as_numpy_dtype
    if not part.is_table:
        return np.asarray(random.integers(-1, 2, part.shape)).astype(dtype)
    rows = random.integers(0, part.shape[0], LOOKUPS)  # unsorted, some of them twice
    shape = (LOOKUPS, *part.shape[1:])
    return rows, random.integers(-1, 2, shape).astype(dtype)


def specs(kind: str, num_towers: int) -> list[list[Any]]:
    """What is known of ``inputs`` while building."""
    return [
        [_spec(part, k in part.unknown) for part in KINDS[kind]]
        for k in range(num_towers)
    ]


def _spec(part: Part, is_unknown: bool) -> Any:
    shape = (LOOKUPS, *part.shape[1:]) if part.is_table else part.shape
    known = (None,) * len(shape) if is_unknown else shape
    factors = tf.TensorSpec(known, part.dtype)
    return (tf.TensorSpec(known[:1], tf.int64), factors) if part.is_table else factors


def flat_group(name: str) -> str | None:
    """Leaves tables alone, whose gradients are sparse; names are ``kind/v0``."""
    kind, _, number = name.partition("/v")
    return None if KINDS[kind][int(number)].is_table else kind


def gradients(
    variables: list[Any], given: list[Any], by: list[Any] | None = None
) -> list[Any]:
    """The [N] gradients of the sum of products of variables and factors.

    They are the factors: dense, or sparse for a table, of which rows are looked up.
    No more is known of their shapes than of the factors'.

    ``by`` holds the variables, if these are views; then these have the gradients.
    """
    reads, factors = [], []
    for variable, own in zip(variables, given, strict=True):
        if isinstance(own, tuple | list):
            reads.append(tf.gather(variable, own[0]))
            factors.append(own[1])
        else:
            reads.append(variable.read_value())
            factors.append(own)
    if by is not None:
        return tf.gradients(reads, by, grad_ys=factors)  # type: ignore[no-any-return]
    grads = tf.gradients(reads, variables, grad_ys=factors)
    return [
        # The variable's shape is known, and would be the gradient's.
        tf.compat.v1.placeholder_with_default(grad, own.shape)
        if isinstance(own, tf.Tensor) and not own.shape.is_fully_defined()
        else grad
        for grad, own in zip(grads, given, strict=True)
    ]


def optimizer(decay: float, variables: Any = None) -> Any:
    """Makes TensorFlow's optimizer."""
    if decay == 0:
        return tf.compat.v1.train.GradientDescentOptimizer(RATE)
    return tf.compat.v1.train.MomentumOptimizer(RATE, decay)


def oracle(
    kind: str, num_towers: int, *, average: bool, decay: float, stays_sparse: bool
) -> list[np.ndarray]:
    """The same on the whole batch, in NumPy; [N] float64.

    As in TensorFlow, a sparse gradient lets the momentum decay in the rows that it
    holds only, and a dense one everywhere.
    """
    results = []
    for n, part in enumerate(KINDS[kind]):
        value = start(part, 0).astype(np.float64)
        momentum = np.zeros_like(value)
        for step in range(STEPS):
            column = [tower[n] for tower in inputs(kind, num_towers, step)]
            grad, held = _whole(part, column)
            grad = grad / num_towers if average else grad
            moved = held if stays_sparse else np.full(part.shape, True)
            momentum = np.where(moved, decay * momentum + grad, momentum)
            value = value - RATE * np.where(moved, momentum, 0.0)
        results.append(value)
    return results


def _whole(part: Part, column: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The sum over towers, and which entries it holds."""
    grad = np.zeros(part.shape)
    if not part.is_table:
        return sum((own.astype(np.float64) for own in column), grad), grad == 0
    held = np.zeros(part.shape, bool)
    for rows, factors in column:
        np.add.at(grad, rows, factors.astype(np.float64))
        held[rows] = True
    return grad, held
