"""Test support for all packages: running one function in each mode.

``run_in_graph`` and its siblings run one function in each mode. The devices are
fakes: eight logical CPUs, made before TensorFlow starts. A graph is fed through
placeholders, so that nothing is computed while it is built.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tw_core._checks import check_function
from tw_core._variable_kinds import is_variable, tf_variable
from tw_core.devices._logical import use_logical_cpus

__all__ = [
    "CPUS",
    "NUM_CPUS",
    "SparseRows",
    "run_eagerly",
    "run_in_function",
    "run_in_graph",
    "start_logical_cpus",
]

NUM_CPUS = 8
CPUS = tuple(f"/cpu:{i}" for i in range(NUM_CPUS))


class SparseRows(NamedTuple):
    """An ``IndexedSlices`` as arrays.

    Attributes:
      values: [R, ...] rows.
      indices: [R] which row of the dense array each belongs to; may repeat.
      dense_shape: [rank] whole numbers, or None where it is unknown.
    """

    values: np.ndarray
    indices: np.ndarray
    dense_shape: np.ndarray | None = None

    def to_dense(self) -> np.ndarray:
        """Adds the rows up into the dense array that they represent.

        Raises:
          ValueError: ``dense_shape`` is None.

        >>> rows = np.array([[1.0, 2.0], [3.0, 4.0]])
        >>> SparseRows(rows, np.array([1, 1]), np.array([2, 2])).to_dense()
        array([[0., 0.],
               [4., 6.]])
        """
        if self.dense_shape is None:
            raise ValueError("SparseRows.to_dense: dense_shape is None; pass it.")
        dense = np.zeros(tuple(self.dense_shape), self.values.dtype)
        np.add.at(dense, self.indices, self.values)
        return dense


def start_logical_cpus() -> tuple[str, ...]:
    """Makes the eight logical CPUs of ``CPUS``; call it from ``conftest.py``.

    Raises:
      RuntimeError: TensorFlow has already started with another number.
    """
    return tuple(use_logical_cpus(NUM_CPUS))


def run_in_graph(
    fn: Callable[..., Any], *args: Any, config: tf.compat.v1.ConfigProto | None = None
) -> Any:
    """Builds ``fn`` in a new graph, and runs it once in a session.

    Args:
      fn: takes tensors where ``args`` has arrays, and returns a structure of
        tensors, ``IndexedSlices``, variables, operations and None.
      *args: any nesting of arrays, floats (float32) and ``SparseRows``, which
        become placeholders; everything else is passed on as it is.
      config: of the session; by default TensorFlow's own with ``CPUS``.

    Returns:
      ``fn``'s structure with arrays for tensors, ``SparseRows`` for
      ``IndexedSlices`` and None for operations; tuples become lists.
    """
    check_function(fn=fn)
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        feeds: list[tuple[tf.Tensor, np.ndarray]] = []
        outputs = fn(*_map(lambda leaf: _placeholder(leaf, feeds), args))
        init = [v1.global_variables_initializer(), v1.local_variables_initializer()]
        config = config or v1.ConfigProto(device_count={"CPU": NUM_CPUS})
        with v1.Session(graph=graph, config=config) as sess:
            sess.run(init)
            fetches = [_as_tensor(leaf) for leaf in _leaves(_is_fetch, outputs)]
            values = sess.run(fetches, dict(feeds))
    return _filled(_is_fetch, outputs, map(_as_rows, values))


def run_in_function(fn: Callable[..., Any], *args: Any) -> Any:
    """Traces ``fn`` as a ``tf.function`` and calls it once; like ``run_in_graph``.

    Returns:
      The same structure as ``run_in_graph``.
    """
    check_function(fn=fn)

    def traced(tensors: list[Any]) -> Any:
        return fn(*_filled(_is_data, args, tensors))

    call = tf.function(traced, autograph=False)
    return _map(_to_numpy, call([_to_tensor(leaf) for leaf in _leaves(_is_data, args)]))


def run_eagerly(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls ``fn`` with eager tensors; like ``run_in_function``."""
    check_function(fn=fn)
    return _map(_to_numpy, fn(*_map(_to_tensor, args)))


def _map(fn: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, tf.IndexedSlices | SparseRows):
        return fn(tree)
    if isinstance(tree, dict):
        return {key: _map(fn, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_map(fn, item) for item in tree]
    return fn(tree)


def _is_data(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic | float | SparseRows)


def _is_fetch(leaf: Any) -> bool:
    kinds = tf.Tensor | tf.IndexedSlices | tf.Operation
    return isinstance(leaf, kinds) or is_variable(leaf)


def _leaves(kind: Callable[[Any], bool], tree: Any) -> list[Any]:
    found: list[Any] = []
    _map(lambda leaf: found.append(leaf) if kind(leaf) else None, tree)
    return found


def _filled(kind: Callable[[Any], bool], tree: Any, values: Iterable[Any]) -> Any:
    """Puts values in the place of ``_leaves(kind, tree)``."""
    given = iter(values)
    return _map(lambda leaf: next(given) if kind(leaf) else leaf, tree)


def _as_tensor(leaf: Any) -> Any:
    return tf_variable(leaf) if is_variable(leaf) else leaf


def _as_rows(value: Any) -> Any:
    is_sparse = hasattr(value, "indices") and hasattr(value, "dense_shape")
    return SparseRows(*value) if is_sparse else value


def _array(leaf: Any) -> np.ndarray:
    return np.asarray(leaf, np.float32 if type(leaf) is float else None)


def _placeholder(leaf: Any, feeds: list[tuple[tf.Tensor, np.ndarray]]) -> Any:
    if isinstance(leaf, SparseRows):
        return tf.IndexedSlices(*(_placeholder(part, feeds) for part in leaf))
    if not _is_data(leaf):
        return leaf
    array = _array(leaf)
    tensor = tf.compat.v1.placeholder(array.dtype, array.shape)
    feeds.append((tensor, array))
    return tensor


def _to_tensor(leaf: Any) -> Any:
    if isinstance(leaf, SparseRows):
        return tf.IndexedSlices(*(_to_tensor(part) for part in leaf))
    return tf.convert_to_tensor(_array(leaf)) if _is_data(leaf) else leaf


def _to_numpy(leaf: Any) -> Any:
    if isinstance(leaf, tf.IndexedSlices):
        shape = None if leaf.dense_shape is None else leaf.dense_shape.numpy()
        return SparseRows(leaf.values.numpy(), leaf.indices.numpy(), shape)
    if isinstance(leaf, tf.Operation):
        return None
    leaf = _as_tensor(leaf)
    return leaf.numpy() if isinstance(leaf, tf.Tensor | tf.Variable) else leaf
