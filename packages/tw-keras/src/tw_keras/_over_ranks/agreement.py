"""What ranks agree on before they train: settings, seeds, and numbers of rank 0's."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tw_core.ranks import RankGroup

_UNSET_SEED = 87_654_321  # what TensorFlow answers where no seed was set
_SEEDS_APART = 0x9E3779B1  # odd and large, so that layers' seeds stay apart
_CHOICES = {
    "data": ("'own'", "'shared'"),
    "uneven": ("'wait'", "'stop'"),
    "validation data": ("no", "yes"),
}


def begin_fit(group: RankGroup, settings: Mapping[str, int], *, seeds: bool) -> None:
    """Refuses ``settings`` that differ between ranks; all ranks call it.

    With ``seeds``, which is a setting, too, ranks take rank 0's seed of TensorFlow, by
    which data is shuffled.
    """
    seed, _ = tf.compat.v1.get_seed(1)
    drawn = int(np.random.default_rng().integers(2**31))
    own = np.zeros([group.size, 1 + len(settings)], np.int64)
    own[group.rank] = drawn if seed == _UNSET_SEED else seed, *settings.values()
    (total,) = group.sum([tf.constant(own)], names=["settings of fit"])
    of_all = total.numpy()
    unlike = [
        f"{name}={_by_rank(name, column.tolist())}"
        for name, column in zip(settings, of_all.T[1:], strict=True)
        if len(set(column)) > 1
    ]
    if unlike:
        raise ValueError(
            f"TowerModel: fit needs the same settings on all ranks; got "
            f"{'; '.join(unlike)}."
        )
    if seeds and seed != of_all[0, 0]:
        tf.random.set_seed(int(of_all[0, 0]))


def _by_rank(name: str, values: Sequence[int]) -> str:
    """Tells which ranks have which of the values."""
    ranks: dict[int, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return ", ".join(
        f"{_CHOICES[name][value] if name in _CHOICES else value} on rank"
        f"{'s' if len(own) > 1 else ''} {' and '.join(own)}"
        for value, own in ranks.items()
    )


def numbers_of_rank_0(group: RankGroup, *numbers: int) -> list[int]:
    """Returns rank 0's numbers; all ranks call it."""
    own = tf.constant([*numbers] if group.rank == 0 else [0] * len(numbers), tf.int64)
    (total,) = group.sum([own], names=["numbers of rank 0"])
    return [int(number) for number in total]


def spread_seeds(group: RankGroup, seeds: Sequence[tf.Variable]) -> None:
    """Derives each rank's ``seeds``, [2] a seed and a counter, from rank 0's.

    What they are called depends on where a program drew first.
    """
    for n, state in enumerate(seeds):
        own = state.read_value()
        own = own if group.rank == 0 else tf.zeros_like(own)
        (of_first,) = group.sum([own], names=[f"random state {n}"])
        apart = group.rank * _SEEDS_APART % 2**31
        state.assign(of_first + tf.constant([apart, 0], own.dtype))


def settings_of(model: Any, arguments: Mapping[str, Any]) -> dict[str, int]:
    """Returns what a model's ``fit``, called with ``arguments``, needs of all ranks."""
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # scales losses
    accumulates = getattr(optimizer, "gradient_accumulation_steps", None)
    validates = arguments.get("validation_data") is not None
    return {
        "epochs": int(arguments.get("epochs", 1)),
        "steps_per_execution": int(model.steps_per_execution),
        "gradient_accumulation_steps": int(accumulates or 1),
        "validation data": validates or bool(arguments.get("validation_split")),
    }
