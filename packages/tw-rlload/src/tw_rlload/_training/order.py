"""The order in which epochs visit their minibatches or rows; NumPy only.

An order depends only on the plan, the kind of shuffle, the seed and the number of
epochs, so that a run can be repeated. A whole order runs in one call, or, with a
progress bar, in one call per epoch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from tw_core.internal import check_flag, check_whole_number
from tw_rlload._loading.plan import LoadPlan

Shuffle: TypeAlias = Literal["minibatches", "rows"]


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """The order of E epochs of S steps on K devices.

    Attributes:
      shuffle: None, ``"minibatches"`` or ``"rows"``.
      seed: seed of the random order; None where nothing was drawn.
      steps: [E, S] int32, the minibatch of the load that each step takes; with
        ``"rows"`` simply 0, 1, 2, ...
      sequences: [E, S, K, B] int32, the sequences of its device that a tower takes
        in each step; None unless ``shuffle`` is ``"rows"``.
    """

    shuffle: Shuffle | None
    seed: int | None
    steps: npt.NDArray[np.int32]
    sequences: npt.NDArray[np.int32] | None


def epoch_order(
    plan: LoadPlan,
    num_epochs: int,
    shuffle: Shuffle | None = None,
    *,
    seed: int | None = None,
) -> EpochOrder:
    """Draws the order of epochs.

    Args:
      plan: plan of the batch.
      num_epochs: E, at least 1.
      shuffle: None for the order of loading; ``"minibatches"`` permutes whole
        steps; ``"rows"`` permutes the sequences (rows, without states) of each
        device within it.
      seed: 0 or more; the same seed gives the same order. None draws one, which
        the result holds.

    Returns:
      The order. Every sequence occurs once per epoch.

    Raises:
      TypeError: ``plan`` is not a plan, or a number is not whole.
      ValueError: fewer than 1 epoch, an unknown ``shuffle``, a negative seed.
    """
    if not isinstance(plan, LoadPlan):
        raise TypeError(
            "plan must be a LoadPlan, as plan_load returns it; got "
            f"{type(plan).__name__}."
        )
    check_whole_number(num_epochs=num_epochs, at_least=1)
    if shuffle is not None and shuffle not in get_args(Shuffle):
        raise ValueError(
            f"shuffle must be None or one of {list(get_args(Shuffle))}; got "
            f"{shuffle!r}."
        )
    if seed is not None:
        check_whole_number(seed=seed, at_least=0)
    steps = np.tile(np.arange(plan.steps, dtype=np.int32), (num_epochs, 1))
    if shuffle is None:
        return EpochOrder(None, None, steps, None)
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    rng = np.random.default_rng(seed)
    if shuffle == "minibatches":
        return EpochOrder(shuffle, seed, rng.permuted(steps, axis=1), None)
    sequences = np.arange(plan.sequences_per_device, dtype=np.int32)
    sequences = np.tile(sequences, (num_epochs, plan.num_devices, 1))
    cut = (num_epochs, plan.num_devices, plan.steps, plan.sequences_per_device_step)
    drawn = rng.permuted(sequences, axis=2).reshape(cut).swapaxes(1, 2)
    return EpochOrder(shuffle, seed, steps, np.ascontiguousarray(drawn))


def run_with_progress(
    run: Callable[[EpochOrder], npt.NDArray[np.float64]],
    order: EpochOrder,
    *,
    progress: bool,
) -> npt.NDArray[np.float64]:
    """Runs an order in one call, or with a progress bar in one call per epoch."""
    if not check_flag(progress=progress):
        return run(order)
    try:
        tqdm = import_module("tqdm.auto").tqdm
    except ImportError as error:
        raise ImportError(
            "progress=True needs tqdm; install it with pip install 'tqdm>=4.66', or "
            "pass progress=False."
        ) from error
    parts = []
    for e in tqdm(range(len(order.steps)), desc="epochs", unit="epoch"):
        sequences = None if order.sequences is None else order.sequences[e : e + 1]
        epoch = replace(order, steps=order.steps[e : e + 1], sequences=sequences)
        parts.append(run(epoch))
    return np.concatenate(parts)
