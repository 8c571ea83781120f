"""The same gradients for every contender: K towers' lists, and NumPy's sums.

They lie in variables, one set a session and one for functions, so that no
contender may write its sum over a gradient that others still need.
"""

from typing import Any

import numpy as np
import racing
import tensorflow as tf
from profiles import Profile, dense_values, sparse_values

v1 = tf.compat.v1
Lists = list[list[Any]]


class Arrays:
    """One profile's values for K towers, and what NumPy makes of them."""

    def __init__(self, profile: Profile, towers: int):
        self.profile = profile
        self.dense = [dense_values(profile, k) for k in range(towers)]
        self.sparse = [sparse_values(profile, k) for k in range(towers)]
        self.sums = [np.add.reduce(column) for column in zip(*self.dense, strict=True)]
        self.sums += [
            _dense_sum(table.shape, [tower[n] for tower in self.sparse])
            for n, table in enumerate(profile.sparse)
        ]

    def flat(self, tower: int) -> np.ndarray:
        """A tower's dense gradients as one buffer."""
        return np.concatenate([array.ravel() for array in self.dense[tower]])

    def check(self, name: str, results: Lists, *, scale: float) -> None:
        """Compares every element of every tower's results with NumPy's sums."""
        for k, tower in enumerate(results):
            for n, (got, want) in enumerate(zip(tower, self.sums, strict=True)):
                dense = _to_dense(got, want.shape)
                if not np.array_equal(dense, want * np.float32(scale)):
                    raise AssertionError(
                        f"{name}: wrong sum of tensor {n} on tower {k}"
                    )


class Variables:
    """The arrays on the towers' devices, in a session's graph or for functions."""

    def __init__(self, arrays: Arrays, *, flat: bool = False):
        self._values: list[tuple[Any, np.ndarray]] = []
        self._profile = arrays.profile
        self.towers = []
        for k, dense in enumerate(arrays.dense):
            held = [arrays.flat(k)] if flat else dense
            sparse = [] if flat else arrays.sparse[k]
            with tf.device(racing.device_names(k + 1)[k]):
                self.towers.append(
                    (
                        [self._hold(array) for array in held],
                        [(self._hold(v), self._hold(i)) for v, i in sparse],
                    )
                )

    def grads(self) -> Lists:
        """Reads all, as [K][N] tensors and IndexedSlices."""
        lists = []
        for k, (dense, sparse) in enumerate(self.towers):
            with tf.device(racing.device_names(k + 1)[k]):
                rows = [
                    tf.IndexedSlices(
                        v.read_value(), i.read_value(), tf.constant(t.shape)
                    )
                    for (v, i), t in zip(sparse, self._profile.sparse, strict=False)
                ]
                lists.append([*(held.read_value() for held in dense), *rows])
        return lists

    def load(self, session: v1.Session) -> None:
        """Fills the variables of a session's graph."""
        feeds = {v1.placeholder(a.dtype, a.shape): a for _, a in self._values}
        held = [variable for variable, _ in self._values]
        session.run(
            [v.assign(feed).op for v, feed in zip(held, feeds, strict=True)], feeds
        )

    def _hold(self, array: np.ndarray) -> Any:
        if tf.executing_eagerly():
            return tf.Variable(array, trainable=False)
        zeros = tf.zeros(array.shape, array.dtype)
        variable = v1.Variable(zeros, trainable=False, use_resource=True)
        self._values.append((variable, array))
        return variable


class Fetched:
    """Which distinct tensors [K][N] results consist of, and putting them back."""

    def __init__(self, results: Lists):
        leaves = [leaf for row in results for result in row for leaf in _leaves(result)]
        self.tensors = list({id(leaf): leaf for leaf in leaves}.values())
        place = {id(leaf): p for p, leaf in enumerate(self.tensors)}
        self._places = [
            [[place[id(leaf)] for leaf in _leaves(result)] for result in row]
            for row in results
        ]

    def lists(self, arrays: list[Any]) -> Lists:
        """Arranges fetched arrays as [K][N]; an IndexedSlices is a pair."""
        numpy = [np.asarray(array) for array in arrays]
        return [[[numpy[p] for p in places] for places in row] for row in self._places]


def _leaves(result: Any) -> list[Any]:
    if isinstance(result, tf.IndexedSlices):
        return [result.values, result.indices]
    return [result]


def _to_dense(leaves: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    return leaves[0] if len(leaves) == 1 else _dense_sum(shape, [tuple(leaves)])


def _dense_sum(
    shape: tuple[int, ...], parts: list[tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    total = np.zeros(shape, np.float32)
    for values, indices in parts:
        np.add.at(total, indices, values)
    return total
