"""Compression with error feedback: unsent parts are added to the next gradient.

Source: Karimireddy, Rebjock, Stich and Jaggi, "Error Feedback Fixes SignSGD and other
Gradient Compression Schemes", ICML 2019.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core.internal import (
    check_flag,
    check_function,
    check_whole_number,
    tf_variables,
)
from tw_reduce._checks import ADDABLE, compressor_name
from tw_reduce._memory.in_parts import add_in_parts
from tw_reduce._memory.protocol import Compressor, StatefulReducer, States
from tw_reduce._memory.rows import RowCompressor, cut_row, is_row, join_rows
from tw_reduce._reducer import Reducer, Tensorlike


def error_feedback(
    compressor: Compressor, *, min_elements: int = 4096, draws: bool = False
) -> StatefulReducer:
    """Makes a reducer that compresses each gradient by a compressor.

    Every tower keeps the error, gradient minus approximation, and adds it to its next
    gradient. Matrices and tensors of more dimensions are compressed; biases, scales and
    other small or sparse gradients are sent unchanged.

    Args:
      compressor: ``top_k()``, ``sign()``, ``int8()`` or a function of your own. It
        takes a dense float32 or float64 tensor of known shape; it returns a list of
        tensors and ``tf.IndexedSlices`` to send, and a function of their sums over
        towers that returns the sum of the towers' approximations.
      min_elements: tensors of fewer elements are not compressed.
      draws: whether the compressor also takes a seed, int64 [2], for functions such as
        ``tf.random.stateless_uniform``: another one for each variable and update, and
        the same in all towers, those of other processes included.

    Returns:
      A reducer with memory: of the size of the variables and in their dtype, or in
      float32 if theirs is narrower. Sums of sent and remembered parts are those of the
      gradients.

    Raises:
      TypeError: ``compressor`` is not a function of a tensor, ``min_elements`` not a
        whole number, or ``draws`` not a bool; when called, the compressor returns
        something else than a list and a function, or sends what cannot be added.
      ValueError: ``min_elements`` is negative; when called, the compressor's
        approximation has another shape or dtype than the tensor.
    """
    check_function(compressor=compressor)
    made = compressor_name(compressor)
    if made == f"{getattr(compressor, '__name__', '')}()":
        raise TypeError(
            f"compressor must compress a tensor; this function makes one: write {made}."
        )
    check_whole_number(min_elements=min_elements, at_least=0)
    return _ErrorFeedback(compressor, min_elements, draws=check_flag(draws=draws))


class _ErrorFeedback:
    """A reducer with memory around a compressor."""

    def __init__(
        self, compressor: Compressor, min_elements: int, *, draws: bool
    ) -> None:
        self._compress = compressor
        self._min_elements, self._draws = min_elements, draws
        self._of_parts: Any = None  # if ranks may exchange these
        if isinstance(compressor, RowCompressor) and compressor.cuts and not draws:
            self._of_parts = compressor

    def init(self, variables: Sequence[Any]) -> list[Any]:
        """Returns zeros for the variables that are compressed."""
        memory: list[Any] = []
        for n, own in enumerate(tf_variables(variables)):
            memory.append(())
            if is_compressible(own, min_elements=self._min_elements):
                memory[n] = {"error": tf.zeros(own.shape, state_dtype(own.dtype))}
                if self._draws:
                    memory[n]["seed"] = tf.constant([n, 0], tf.int64)
        return memory

    def update(
        self, grads: Sequence[Sequence[tf.Tensor]], states: States, add: Reducer
    ) -> tuple[list[list[tf.Tensor]], States]:
        """Sends approximations, and returns errors."""
        if self._of_parts and getattr(add, "group", None) is not None:
            return self._update_in_parts(grads[0], states[0], add)
        sent: list[list[Any]] = [[] for _ in grads]
        errors: list[list[Any]] = [[] for _ in grads]
        decoders: list[tuple[int, Any]] = []  # of tower 0: number sent, and decode
        for k, (tower, own) in enumerate(zip(grads, states, strict=True)):
            for grad, state in zip(tower, own, strict=True):
                with tf.device(grad.device):
                    parts, decode, error = self._send(grad, state)
                sent[k] += parts
                errors[k].append(error)
                if k == 0:
                    decoders.append((len(parts), decode))
        sums = _add_joined(sent, add)
        return [
            _read(tower, decoders, own) for tower, own in zip(sums, grads, strict=True)
        ], errors

    def resize(self, states: Sequence[Any], count: int) -> list[Any]:
        """Divides the errors of all towers among ``count`` towers."""
        return resized_errors(states, count)

    def _update_in_parts(
        self, grads: Sequence[tf.Tensor], states: Sequence[Any], add: Any
    ) -> tuple[list[list[tf.Tensor]], States]:
        """Does so for a single tower, in parts that belong to ranks."""
        places = [m for m, state in enumerate(states) if state != ()]
        others = [m for m, state in enumerate(states) if state == ()]
        [sums] = add([[grads[m] for m in others]])
        found, errors = dict(zip(others, sums, strict=True)), dict[int, Any]()
        if places:
            fulls = [_full(grads[m], states[m]) for m in places]
            totals, left = add_in_parts(fulls, self._of_parts, add)
            for m, total, error in zip(places, totals, left, strict=True):
                with tf.device(grads[m].device):
                    found[m] = tf.cast(total, grads[m].dtype)
                errors[m] = {"error": error}
        every = range(len(grads))
        return [[found[m] for m in every]], [[errors.get(m, ()) for m in every]]

    def _send(self, grad: tf.Tensor, state: Any) -> tuple[list[Any], Any, Any]:
        if state == ():
            return [grad], None, ()
        full = _full(grad, state)
        given, new = [full], {}
        if self._draws:
            given.append(state["seed"])
            new["seed"] = state["seed"] + [0, 1]
        parts, decode = _read_compressed(self._compress(*given))
        decode = partial(_decoded, decode, full.shape, full.dtype)
        return parts, decode, {"error": full - decode(*parts), **new}


def is_compressible(variable: tf.Variable, *, min_elements: int) -> bool:
    """Returns whether a variable's gradient is a matrix or more, and large enough."""
    shape = variable.shape
    return (
        bool(variable.dtype.is_floating)
        and shape.is_fully_defined()
        and shape.rank >= 2
        and shape.num_elements() >= max(min_elements, 1)
    )


def state_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which errors of a variable are kept."""
    return tf.float64 if dtype.base_dtype == tf.float64 else tf.float32


def resized_errors(states: Sequence[Any], count: int) -> list[Any]:
    """Divides errors, and copies the rest of the memory from tower 0."""
    total = tf.add_n([own["error"] for own in states])
    return [{**states[0], "error": total / count} for _ in range(count)]


def _full(grad: tf.Tensor, state: Any) -> tf.Tensor:
    with tf.device(grad.device):
        return tf.cast(grad, state["error"].dtype) + state["error"]


def _read_compressed(result: Any) -> tuple[list[Any], Callable[..., Any]]:
    """Refuses the result of a compressor that is not a list and a function."""
    is_pair = isinstance(result, Sequence) and len(result) == 2
    if not (is_pair and isinstance(result[0], list | tuple) and callable(result[1])):
        raise TypeError(
            "compressor must return two things, a list of tensors and tf.IndexedSlices "
            "to send, and a function that reads them, as in `return [sent], read`; got "
            f"{result!r:.120}."
        )
    parts, decode = result
    if unfit := [
        f"{n} ({own.dtype.name if tf.is_tensor(own) else type(own).__name__})"
        for n, own in enumerate(parts)
        if not isinstance(own, Tensorlike) or own.dtype.name not in ADDABLE
    ]:
        raise TypeError(
            "compressor must send tensors and tf.IndexedSlices that can be added, such "
            "as float32 and int32; got others at positions "
            f"{', '.join(unfit)}. Cast them first."
        )
    return list(parts), decode


def _decoded(
    decode: Callable[..., Any], shape: tf.TensorShape, dtype: tf.DType, *parts: Any
) -> tf.Tensor:
    """Calls a compressor's function; refuses a result of another shape or dtype."""
    result = decode(*parts)
    fits = isinstance(result, tf.Tensor) and result.dtype == dtype
    if not fits or not result.shape.is_compatible_with(shape):
        raise ValueError(
            "The function that a compressor returns must return a tensor of shape "
            f"{shape} and {dtype.name}; got {result!r:.120}."
        )
    return result if result.shape == shape else tf.ensure_shape(result, shape)


def _read(
    sums: Sequence[Any], decoders: Sequence[tuple[int, Any]], like: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    rest, results = iter(sums), []
    for (count, decode), grad in zip(decoders, like, strict=True):
        parts = [next(rest) for _ in range(count)]
        with tf.device(grad.device):
            total = parts[0] if decode is None else decode(*parts)
            results.append(tf.cast(total, grad.dtype))
    return results


def _add_joined(sent: Sequence[Sequence[Any]], add: Reducer) -> list[list[Any]]:
    """Adds, with the rows of all variables joined into one: a single exchange."""
    columns = zip(*sent, strict=True)
    rows = [m for m, column in enumerate(columns) if all(map(is_row, column))]
    if len(rows) < 2:
        return add(sent)
    rest = [m for m in range(len(sent[0])) if m not in rows]
    joined = [
        [*(own[m] for m in rest), join_rows([own[m] for m in rows])] for own in sent
    ]
    results = []
    for *others, row in add(joined):
        parts = cut_row(
            row, [own.values.shape[1] for own in map(sent[0].__getitem__, rows)]
        )
        found = dict(zip([*rest, *rows], [*others, *parts], strict=True))
        results.append([found[m] for m in range(len(found))])
    return results
