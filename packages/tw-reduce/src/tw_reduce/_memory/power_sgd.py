"""Matrices of low rank: two thin factors are sent in place of a matrix.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient
Compression for Distributed Optimization", NeurIPS 2019.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_core.internal import check_number, check_whole_number, tf_variables
from tw_reduce._memory.error_feedback import (
    is_compressible,
    resized_errors,
    state_dtype,
)
from tw_reduce._memory.protocol import StatefulReducer, States
from tw_reduce._reducer import Reducer

# The bits of a float's exponent, which alone are the power of two below it.
_EXPONENTS = {
    tf.float32: (tf.int32, 0x7F800000),
    tf.float64: (tf.int64, 0x7FF0000000000000),
}


def power_sgd(
    *, rank: int = 4, min_rate: float = 2.0, seed: int = 0
) -> StatefulReducer:
    """Makes a reducer that sends every matrix as the product of two thin ones.

    A tensor of more dimensions is treated as a matrix with its last dimension as
    columns. One step of power iteration, which starts from the last step's factor,
    computes the factors; every tower adds the error to its next gradient.

    Args:
      rank: the factors' number of columns.
      min_rate: how many times smaller the factors must be for a matrix to be
        compressed; others, biases and sparse gradients are sent unchanged.
      seed: of the first factors, the same for all towers and processes.

    Returns:
      A reducer with memory: an error of the variable's size, and one factor. All
      towers compute the same sums from the same factors, on devices of one kind.

    Raises:
      TypeError: an argument of another type.
      ValueError: ``rank`` below 1, or ``min_rate`` below 1.
    """
    check_whole_number(rank=rank, at_least=1)
    check_number(min_rate=min_rate, at_least=1)
    check_whole_number(seed=seed)
    return _PowerSgd(rank, float(min_rate), seed)


class _PowerSgd:
    """A reducer with memory: errors, and the right factors of the last step."""

    def __init__(self, rank: int, min_rate: float, seed: int) -> None:
        self._rank, self._min_rate, self._seed = rank, min_rate, seed

    def init(self, variables: Sequence[Any]) -> list[Any]:
        """Returns errors of zeros, and random factors."""
        return [self._start(n, own) for n, own in enumerate(tf_variables(variables))]

    def update(
        self, grads: Sequence[Sequence[tf.Tensor]], states: States, add: Reducer
    ) -> tuple[list[list[tf.Tensor]], States]:
        """Sends left factors, then right ones."""
        fulls = _map(_full, grads, states)
        left = add(_map(_left, fulls, states))
        bases = _map(_basis, left, states)
        rights = _map(_right, fulls, bases, states)
        some = [m for m, own in enumerate(states[0]) if own != ()]
        summed = add([[tower[m] for m in some] for tower in rights])
        factors = [dict(zip(some, own, strict=True)) for own in summed]
        sums = [
            [
                _sum_of(grad, total, basis, found.get(m))
                for m, (grad, total, basis) in enumerate(
                    zip(tower, totals, own, strict=True)
                )
            ]
            for tower, totals, own, found in zip(
                grads, left, bases, factors, strict=True
            )
        ]
        shapes = [grad.shape for grad in grads[0]]
        new = [
            [
                () if m not in found else _state(full, basis, right, found[m], shape)
                for m, (full, basis, right, shape) in enumerate(
                    zip(tower, own, thin, shapes, strict=True)
                )
            ]
            for tower, own, thin, found in zip(
                fulls, bases, rights, factors, strict=True
            )
        ]
        return sums, new

    def resize(self, states: Sequence[Any], count: int) -> list[Any]:
        """Divides the errors of all towers among ``count``; factors are equal."""
        return resized_errors(states, count)

    def _start(self, place: int, variable: tf.Variable) -> Any:
        rank = self._rank_of(variable)
        if rank is None:
            return ()
        dtype, columns = state_dtype(variable.dtype), variable.shape[-1]
        start = tf.random.stateless_normal(
            [columns, rank], [self._seed, place], dtype=dtype
        )
        return {"error": tf.zeros(variable.shape, dtype), "factor": start}

    def _rank_of(self, variable: tf.Variable) -> int | None:
        """Returns the factors' number of columns; None if not compressed."""
        if not is_compressible(variable, min_elements=1):
            return None
        columns, size = variable.shape[-1], variable.shape.num_elements()
        rank = min(self._rank, columns, size // columns)
        sent = (columns + size // columns) * rank
        return rank if sent * self._min_rate < size else None


def _map(fn: Any, *towers: Any) -> list[list[Any]]:
    """Calls a function for each tower and variable, on the first tensor's device."""
    results = []
    for columns in zip(*towers, strict=True):
        row = []
        for own in zip(*columns, strict=True):
            with tf.device(own[0].device):
                row.append(fn(*own))
        results.append(row)
    return results


def _full(grad: tf.Tensor, state: Any) -> tf.Tensor:
    """Returns gradient plus last error as a matrix; the gradient if uncompressed."""
    if state == ():
        return grad
    full = tf.cast(grad, state["error"].dtype) + state["error"]
    return tf.reshape(full, [-1, grad.shape[-1]])


def _left(full: tf.Tensor, state: Any) -> tf.Tensor:
    return full if state == () else tf.matmul(full, _near_one(state["factor"]))


def _basis(left: tf.Tensor, state: Any) -> tf.Tensor:
    return left if state == () else tf.linalg.qr(_near_one(left)).q


def _near_one(matrix: tf.Tensor) -> tf.Tensor:
    """Divides by a power of two, so that products and squares stay in range.

    The basis has the same bits: only the directions of columns count.
    """
    largest = tf.reduce_max(tf.abs(matrix))
    whole, exponents = _EXPONENTS[matrix.dtype]
    power = tf.bitwise.bitwise_and(tf.bitcast(largest, whole), exponents)
    return tf.math.divide_no_nan(matrix, tf.bitcast(power, matrix.dtype))


def _right(full: tf.Tensor, basis: tf.Tensor, state: Any) -> tf.Tensor:
    return full if state == () else tf.matmul(full, basis, transpose_a=True)


def _sum_of(grad: tf.Tensor, total: tf.Tensor, basis: tf.Tensor, factor: Any) -> Any:
    if factor is None:
        return total
    with tf.device(grad.device):
        product = tf.matmul(basis, factor, transpose_b=True)
        return tf.cast(tf.reshape(product, grad.shape), grad.dtype)


def _state(
    full: tf.Tensor, basis: tf.Tensor, right: tf.Tensor, factor: tf.Tensor, shape: Any
) -> Any:
    with tf.device(full.device):
        error = full - tf.matmul(basis, right, transpose_b=True)
        return {"error": tf.reshape(error, shape), "factor": factor}
