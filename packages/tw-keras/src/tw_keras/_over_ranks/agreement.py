"""Agreement before ranks train: equal settings, seeds, and numbers of rank 0."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tw_core.ranks import RankGroup
from tw_keras._keras_compat import inner_of

_UNSET_SEED = 87_654_321  # TensorFlow's answer if no seed was set
_SEEDS_APART = 0x9E3779B1  # odd and large, so that layers' seeds stay apart
_CHOICES = {
    "data": ("'own'", "'shared'"),
    "uneven": ("'wait'", "'stop'"),
    "validation data": ("no", "yes"),
}


def begin_fit(
    group: RankGroup, settings: Mapping[str, int], *, seeds: bool, may_stop: bool
) -> bool:
    """Refuses ``settings`` that differ between ranks; all ranks call it.

    With ``seeds``, equal on all ranks, they take rank 0's TensorFlow seed, which
    shuffles data. Returns whether any rank ``may_stop``.
    """
    seed, _ = tf.compat.v1.get_seed(1)
    drawn = int(np.random.default_rng().integers(2**31))
    proposed = drawn if seed == _UNSET_SEED else seed
    report = np.zeros([group.size, 2 + len(settings)], np.int64)
    report[group.rank] = proposed, may_stop, *settings.values()
    (total,) = group.sum([tf.constant(report)], names=["settings of fit"])
    of_all = total.numpy()
    unlike = [
        f"{name}={_by_rank(name, column.tolist())}"
        for name, column in zip(settings, of_all.T[2:], strict=True)
        if len(set(column)) > 1
    ]
    if unlike:
        raise ValueError(
            f"TowerModel: fit needs the same settings on all ranks; got "
            f"{'; '.join(unlike)}."
        )
    if seeds and seed != of_all[0, 0]:
        tf.random.set_seed(int(of_all[0, 0]))
    return bool(of_all[:, 1].any())


def _by_rank(name: str, values: Sequence[int]) -> str:
    """Says which ranks have which values."""
    ranks: dict[int, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return ", ".join(
        f"{_CHOICES[name][value] if name in _CHOICES else value} on rank"
        f"{'s' if len(own) > 1 else ''} {' and '.join(own)}"
        for value, own in ranks.items()
    )


def take_of_rank_0(
    group: RankGroup, *numbers: int, seeds: Sequence[tf.Variable]
) -> list[int]:
    """Returns rank 0's numbers, and derives ``seeds`` from its; all ranks call it.

    Seeds are [2], a seed and a counter; their names depend on which was used first.
    """
    states = [seed.numpy().astype(np.int64) for seed in seeds]
    own = np.concatenate([np.array(numbers, np.int64), *states])
    own = tf.constant(own if group.rank == 0 else np.zeros_like(own))
    (total,) = group.sum([own], names=["numbers of rank 0"])
    taken, *states = np.split(total.numpy(), len(numbers) + 2 * np.arange(len(seeds)))
    apart = group.rank * _SEEDS_APART % 2**31
    for seed, state in zip(seeds, states, strict=True):
        seed.assign(state.astype(seed.dtype.as_numpy_dtype))
        seed.assign_add([apart, 0])
    return [int(number) for number in taken]


def settings_of(model: Any, arguments: Mapping[str, Any]) -> dict[str, int]:
    """Returns the settings of a ``fit`` call that must be equal on all ranks."""
    optimizer = inner_of(getattr(model, "optimizer", None))
    accumulates = getattr(optimizer, "gradient_accumulation_steps", None)
    # Progress is of an optimizer over towers, which accumulates by itself.
    count, steps = getattr(optimizer, "progress", None) or (0, accumulates)
    validates = arguments.get("validation_data") is not None
    return {
        "epochs": int(arguments.get("epochs", 1)),
        "steps_per_execution": int(model.steps_per_execution),
        "gradient_accumulation_steps": int(steps or 1),
        "batches accumulated": count,
        "validation data": validates or bool(arguments.get("validation_split")),
    }
