"""Runs epochs one call each where progress is to be seen, else all in one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from tw_core.checks import check_flag
from tw_rlload._training.order import EpochOrder

Packed = npt.NDArray[np.float64]


def run_with_progress(
    run: Callable[[EpochOrder], Packed], order: EpochOrder, *, progress: bool
) -> Packed:
    """Runs an order, with a bar over the epochs on request.

    Args:
      run: runs the epochs of an order in one call; gives [steps, M].
      order: E epochs of S steps.
      progress: whether to show a bar (needs tqdm), which costs a call an epoch.

    Returns:
      [E * S, M].

    Raises:
      TypeError: ``progress`` is no bool.
      ImportError: a bar is wanted and tqdm is missing.
    """
    if not check_flag("run_epochs", progress=progress):
        return run(order)
    epochs = _bar(len(order.steps))
    return np.concatenate([run(_one_epoch(order, e)) for e in epochs])


def _one_epoch(order: EpochOrder, e: int) -> EpochOrder:
    sequences = None if order.sequences is None else order.sequences[e : e + 1]
    return replace(order, steps=order.steps[e : e + 1], sequences=sequences)


def _bar(num_epochs: int) -> Iterator[int]:
    try:
        tqdm = import_module("tqdm.auto").tqdm
    except ImportError as error:
        raise ImportError(
            "run_epochs: progress=True needs tqdm; install it with pip install "
            "'tqdm>=4.66', or pass progress=False."
        ) from error
    bar: Any = tqdm(range(num_epochs), desc="epochs", unit="epoch")
    return iter(bar)
