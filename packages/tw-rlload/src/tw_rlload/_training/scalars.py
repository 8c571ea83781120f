"""Brings a step's scalars out of a loop as one row of float64.

One write a step, whatever is reported. Every float up to 64 bits, and every
integer below 2**53, comes back exactly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf


@dataclass(frozen=True)
class ScalarLayout:
    """What the numbers of a row are: losses, weights, others; towers in order.

    Attributes:
      loss_dtype: of the losses.
      has_weights: whether the towers' weights follow the losses.
      others: K dictionaries, names and dtypes of what else a tower reports.
    """

    loss_dtype: np.dtype[Any]
    has_weights: bool
    others: tuple[dict[str, np.dtype[Any]], ...]


def lay_out(
    losses: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor] | None,
    others: Sequence[Mapping[str, tf.Tensor]],
) -> tuple[ScalarLayout, list[tf.Tensor]]:
    """Puts the scalars of K towers in a row.

    Args:
      losses: K scalars.
      weights: K scalars, or None.
      others: K dictionaries of scalars.

    Returns:
      The layout, and M scalars.
    """
    layout = ScalarLayout(
        loss_dtype=np.dtype(losses[0].dtype.as_numpy_dtype),
        has_weights=weights is not None,
        others=tuple(
            {name: np.dtype(t.dtype.as_numpy_dtype) for name, t in tower.items()}
            for tower in others
        ),
    )
    rest = [tensor for tower in others for tensor in tower.values()]
    return layout, [*losses, *(weights or ()), *rest]


def pack_scalars(scalars: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns M scalars as [M] float64 on the CPU."""
    with tf.device("/cpu:0"):
        return tf.stack([tf.cast(scalar, tf.float64) for scalar in scalars])
