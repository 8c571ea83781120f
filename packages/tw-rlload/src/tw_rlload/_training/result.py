"""The results of whole epochs, which leave the loop as a row of float64 per step.

One write per step, whatever is reported. Every float up to 64 bits, and every
integer below 2**53, is preserved exactly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tw_rlload._training.order import EpochOrder

Packed: TypeAlias = npt.NDArray[np.float64]
"""[steps, M]: the scalars of each step."""


@dataclass(frozen=True)
class ScalarLayout:
    """The layout of a row: losses, weights if any, others; towers in order."""

    loss_dtype: np.dtype[Any]
    has_weights: bool
    others: tuple[dict[str, np.dtype[Any]], ...]


def lay_out(
    losses: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor] | None,
    others: Sequence[Mapping[str, tf.Tensor]],
) -> tuple[ScalarLayout, list[tf.Tensor]]:
    """Puts the scalars of K towers into a row of M."""
    layout = ScalarLayout(
        loss_dtype=np.dtype(losses[0].dtype.as_numpy_dtype),
        has_weights=bool(weights),
        others=tuple(
            {name: np.dtype(t.dtype.as_numpy_dtype) for name, t in tower.items()}
            for tower in others
        ),
    )
    rest = [tensor for tower in others for tensor in tower.values()]
    return layout, [*losses, *(weights or ()), *rest]


@dataclass(frozen=True, eq=False)
class EpochResult:
    """The losses of E epochs of S steps on K towers.

    Attributes:
      losses: [E, S], the mean over towers, weighted by their rows that are not pads.
      tower_losses: [E, S, K].
      fetches: the last tower's other scalars, [E, S] each, by name.
      towers: the same for every tower; K dictionaries.
      order: the order of the steps; holds the seed.
    """

    losses: npt.NDArray[Any]
    tower_losses: npt.NDArray[Any]
    fetches: dict[str, npt.NDArray[Any]]
    towers: list[dict[str, npt.NDArray[Any]]]
    order: EpochOrder


def make_result(packed: Packed, layout: ScalarLayout, order: EpochOrder) -> EpochResult:
    """Unpacks the scalars of all steps, [E * S, M]."""
    rows = packed.reshape(*order.steps.shape, -1)
    num_towers = len(layout.others)
    losses, rest = rows[..., :num_towers], rows[..., num_towers:]
    weights: Any = None
    if layout.has_weights:
        weights, rest = rest[..., :num_towers], rest[..., num_towers:]
    # The loss of a tower with only pads may be NaN.
    counted = losses if weights is None else np.where(weights > 0, losses, 0)
    towers: list[dict[str, npt.NDArray[Any]]] = []
    for others in layout.others:
        columns = np.moveaxis(rest[..., : len(others)], -1, 0)
        rest = rest[..., len(others) :]
        pairs = zip(others.items(), columns, strict=True)
        towers.append({name: column.astype(dtype) for (name, dtype), column in pairs})
    return EpochResult(
        losses=np.average(counted, axis=-1, weights=weights).astype(layout.loss_dtype),
        tower_losses=losses.astype(layout.loss_dtype),
        fetches=towers[-1],
        towers=towers,
        order=order,
    )
