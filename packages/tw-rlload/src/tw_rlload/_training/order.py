"""In which order an epoch visits its minibatches or rows: NumPy alone.

Orders depend on the plan, the seed and the number of epochs, and on nothing
else; whoever has these three can repeat a run.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from tw_core.checks import check_whole_number
from tw_rlload._loading.plan import LoadPlan

Shuffle: TypeAlias = Literal["minibatches", "rows"]


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """The order of E epochs of S steps on K devices.

    Attributes:
      shuffle: None, ``"minibatches"`` or ``"rows"``.
      seed: what the order was drawn from; None where nothing was drawn.
      steps: [E, S] int32, which minibatch of the load each step takes; with
        ``"rows"`` simply 0, 1, 2, ...
      sequences: [E, S, K, B] int32, which sequences of its device a tower takes
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
    caller: str = "epoch_order",
) -> EpochOrder:
    """Draws the order of epochs.

    Args:
      plan: how the batch was cut.
      num_epochs: E, at least 1.
      shuffle: None for the order of loading; ``"minibatches"`` permutes whole
        steps; ``"rows"`` permutes the sequences (rows, without states) of each
        device within it.
      seed: 0 or more; the same seed gives the same order. None draws one, which
        the result tells.
      caller: who asks; opens the message.

    Returns:
      The order. Every sequence comes once an epoch.

    Raises:
      TypeError: no plan, or something that is no whole number.
      ValueError: fewer than 1 epoch, an unknown ``shuffle``, a negative seed.
    """
    _check(plan, num_epochs, shuffle, seed, caller)
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


def _check(
    plan: LoadPlan,
    num_epochs: int,
    shuffle: str | None,
    seed: int | None,
    caller: str,
) -> None:
    if not isinstance(plan, LoadPlan):
        raise TypeError(
            f"{caller}: plan must be a LoadPlan, as plan_load returns it; got "
            f"{type(plan).__name__}."
        )
    check_whole_number(caller, num_epochs=num_epochs, at_least=1)
    if shuffle is not None and shuffle not in get_args(Shuffle):
        raise ValueError(
            f"{caller}: shuffle must be None or one of {list(get_args(Shuffle))}; "
            f"got {shuffle!r}."
        )
    if seed is not None and check_whole_number(caller, seed=seed) < 0:
        raise ValueError(f"{caller}: seed must be 0 or more; got {seed}.")
