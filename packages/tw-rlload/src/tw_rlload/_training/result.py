"""What whole epochs give back."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tw_rlload._training.order import EpochOrder
from tw_rlload._training.scalars import ScalarLayout


@dataclass(frozen=True, eq=False)
class EpochResult:
    """The losses of E epochs of S steps on K towers.

    Attributes:
      losses: [E, S], the mean over towers, by their rows that count.
      tower_losses: [E, S, K].
      fetches: the last tower's other scalars, [E, S] each, by name.
      towers: the same of every tower; K dictionaries.
      order: in which the steps were made; holds the seed.
    """

    losses: npt.NDArray[Any]
    tower_losses: npt.NDArray[Any]
    fetches: dict[str, npt.NDArray[Any]]
    towers: list[dict[str, npt.NDArray[Any]]]
    order: EpochOrder


def make_result(
    packed: npt.NDArray[np.float64], layout: ScalarLayout, order: EpochOrder
) -> EpochResult:
    """Reads the scalars of all steps.

    Args:
      packed: [E * S, M], a row a step.
      layout: what the M scalars are.
      order: E epochs of S steps.
    """
    rows = packed.reshape(*order.steps.shape, -1)
    num_towers = len(layout.others)
    losses, rest = rows[..., :num_towers], rows[..., num_towers:]
    weights: Any = None
    if layout.has_weights:
        weights, rest = rest[..., :num_towers], rest[..., num_towers:]
    towers: list[dict[str, npt.NDArray[Any]]] = []
    for others in layout.others:
        columns = np.moveaxis(rest[..., : len(others)], -1, 0)
        rest = rest[..., len(others) :]
        pairs = zip(others.items(), columns, strict=True)
        towers.append({name: column.astype(dtype) for (name, dtype), column in pairs})
    return EpochResult(
        losses=np.average(losses, axis=-1, weights=weights).astype(layout.loss_dtype),
        tower_losses=losses.astype(layout.loss_dtype),
        fetches=towers[-1],
        towers=towers,
        order=order,
    )
