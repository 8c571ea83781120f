"""The towers' gradients as an update receives them, and their shares of a mean.

Shares come first: their sum is the mean over all rows of all towers and ranks. So later
stages only add, and memory remembers shares. Only a plain mean over the towers of one
process, which nothing remembers, is divided after the sum.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import tensorflow as tf

from tw_core.internal import (
    has_unique_rows,
    join_rows,
    map_flat,
    map_values,
    scale,
    split_rows,
    values_of,
    weigh,
    weight_dtype,
)

NARROW = ("float16", "bfloat16")
Rows = Sequence[Sequence[Any]]
"""[K][M] gradients of K towers, or [1][M] if all towers have the same."""


@dataclass(frozen=True)
class TowerGradients:
    """The towers' arguments to their optimizer's ``apply``: [K][N], gradients or None.

    ``same_rows``: places of sparse gradients for the same rows in every tower.
    """

    grads: Rows
    variables: Sequence[Sequence[Any]]
    same_rows: Sequence[int] = ()

    @cached_property
    def places(self) -> list[int]:
        """The places of the variables that have a gradient."""
        return [n for n, grad in enumerate(self.grads[0]) if grad is not None]

    @property
    def records(self) -> list[int]:
        """The places of records, such as float8 layers' largest inputs.

        Keras overwrites these variables with their gradients.
        """
        return [
            n
            for n in self.places
            if getattr(self.variables[0][n], "overwrite_with_gradient", False)
        ]

    def widened(self, *, dense: bool) -> "TowerGradients":
        """Makes gradients wide enough for sums, and of known shapes; some dense."""
        rows = [
            [
                grad if grad is None else _wide(grad, v, dense or n in self.same_rows)
                for n, (grad, v) in enumerate(zip(own, variables, strict=True))
            ]
            for own, variables in zip(self.grads, self.variables, strict=True)
        ]
        return TowerGradients(rows, self.variables)

    def shares(
        self, factors: Sequence[Any] | None, *, is_packed: bool = True
    ) -> list[list[Any]]:
        """Returns [K][M] gradients that exist, times their tower's factor.

        Small ones are multiplied together, unless not ``is_packed``: then each is there
        as soon as it is computed.
        """
        rows = [[own[n] for n in self.places] for own in self.grads]
        if factors is not None:
            pairs = zip(rows, factors, strict=True)
            rows = [times(own, factor, is_packed=is_packed) for own, factor in pairs]
        for m, n in enumerate(self.places):
            if n in self.same_rows:
                _add_same_rows(rows, m)
        return rows


def _wide(grad: Any, variable: Any, is_dense: bool) -> Any:
    if is_dense:  # also of a table that every tower and rank reads in the same order
        grad = tf.convert_to_tensor(grad)
    if isinstance(grad, tf.Tensor):
        with tf.device(grad.device):  # The shape is needed without a batch, too.
            grad = tf.ensure_shape(grad, variable.shape)
    if grad.dtype.name in NARROW:  # a sum times rows may overflow
        return map_values(lambda values: tf.cast(values, tf.float32), grad)
    return grad


def times(grads: Sequence[Any], factor: Any, *, is_packed: bool = True) -> list[Any]:
    """Multiplies gradients, dense, sparse or None; small ones as one if packed."""
    if isinstance(factor, float):
        if factor == 1.0:
            return list(grads)
        by = partial(scale, factor=factor)
    else:
        known = [grad for grad in grads if grad is not None]
        by = partial(weigh, weight=tf.cast(factor, weight_dtype(known)))
    each = [g for g in grads if isinstance(g, tf.Tensor)]
    dense = iter(map_flat(by, each) if is_packed else map(by, each))
    return [
        g if g is None else next(dense) if isinstance(g, tf.Tensor) else by(g)
        for g in grads
    ]


def _add_same_rows(rows: list[list[Any]], m: int) -> None:
    """Adds sparse gradients for the same rows; tower 0 gets the sum.

    For example, a table of relative positions is read at the same places in every
    tower, some of them twice. Without this, the rows would repeat more often than on
    one device: only rows known to be unique are added otherwise.
    """
    total = tf.add_n([own[m].values for own in rows])
    for k, own in enumerate(rows):
        end = None if k == 0 else 0
        own[m] = tf.IndexedSlices(total[:end], own[m].indices[:end], own[m].dense_shape)


@dataclass(frozen=True)
class _Part:
    """The spec of a tensor, or of one part of a sparse gradient's rows."""

    shape: Any
    dtype: tf.DType
    indices: tf.DType | None = None
    is_unique: bool = False

    def zeros(self) -> Any:
        values = tf.zeros(self.shape, self.dtype)
        if self.indices is None:
            return values
        none = tf.zeros([0], self.indices)
        if self.is_unique:  # as ``has_unique_rows`` finds
            none = tf.range(tf.zeros([], self.indices))
        return tf.IndexedSlices(values, none)


Specs = Sequence[Sequence[_Part]]
"""[N] specs of gradients; of one that is None no part."""


def specs_of(grads: Sequence[Any]) -> Specs:
    """Describes gradients, of which a rank without a batch makes zeros."""
    return [
        [] if grad is None else [_part_of(part) for part in split_rows(grad)]
        for grad in grads
    ]


def _part_of(grad: Any) -> _Part:
    if not isinstance(grad, tf.IndexedSlices):
        return _Part(grad.shape, grad.dtype)
    shape = [0, *grad.values.shape[1:]]
    return _Part(shape, grad.dtype, grad.indices.dtype, has_unique_rows(grad))


def zeros_of(specs: Specs) -> list[Any]:
    """Returns gradients of zeros, or None."""
    return [join_rows([p.zeros() for p in own]) if own else None for own in specs]


def as_gradient_of(variable: Any, grad: Any) -> Any:
    """Gives a gradient the dtype and, where it is sparse, the shape of a variable."""
    values = tf.cast(values_of(grad), tf.as_dtype(variable.dtype))
    if not isinstance(grad, tf.IndexedSlices):
        return values
    return tf.IndexedSlices(values, grad.indices, tf.constant(list(variable.shape)))


def name_of(variable: Any) -> str:
    """Returns the name under which a variable is exchanged."""
    return str(getattr(variable, "path", variable.name))


def unnumbered(name: str) -> str:
    """Returns a name without the numbers that Keras and scopes count per process."""
    return re.sub(r"(_\d+)+\b", "", name)
