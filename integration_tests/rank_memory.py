"""What ranks do with reducers with memory, and one process with all of their towers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import random_compressors
import tensorflow as tf

import tw_ranks
from tw_core.testing import CPUS
from tw_reduce import ReducerState
from tw_reduce.compression import error_feedback, int8, power_sgd, sign, top_k

SHAPES = [(64, 80), (7,)]
REDUCERS = {
    "top_k": error_feedback(top_k(0.01)),
    "sampled": error_feedback(top_k(0.2, sampled=True)),
    "sign": error_feedback(sign()),
    "int8": error_feedback(int8()),
    "power_sgd": power_sgd(rank=3),
}


def gradients(step: int, tower: int) -> list[np.ndarray]:
    """A tower's, counted over all ranks; the last are values of two sparse rows."""
    random = np.random.default_rng([step, tower])
    shapes = [*SHAPES, (2, 3)]
    return [random.standard_normal(own).astype(np.float32) for own in shapes]


def reduced(group: Any, num_towers: int, steps: int) -> dict[str, Any]:
    """Reduces by each; returns the last sums of all towers, and all errors' sum."""
    first = 0 if group is None else group.rank * num_towers
    add = None if group is None else partial(tw_ranks.sum_across, group=group)
    variables = []
    for device in CPUS[:num_towers]:
        with tf.device(device):
            variables.append([tf.Variable(tf.zeros(s)) for s in [*SHAPES, (5, 3)]])
    states = {
        name: ReducerState(own, variables, add=add) for name, own in REDUCERS.items()
    }

    def step(towers: Any) -> dict[str, Any]:
        sparse = [
            [*own, tf.IndexedSlices(rows, tf.constant([4, 1]), tf.constant([5, 3]))]
            for *own, rows in towers
        ]
        return {
            name: [list(map(tf.convert_to_tensor, own)) for own in state(sparse)]
            for name, state in states.items()
        }

    run: Callable[..., Any] = tf.function(step, autograph=False)
    run = run if group is None else group.bounded(run)
    for n in range(steps):
        towers = [gradients(n, first + k) for k in range(num_towers)]
        sums = run(tf.nest.map_structure(tf.constant, towers))
    return {
        name: (
            [[own.numpy() for own in tower] for tower in sums[name]],
            sum(own[0].numpy() for own in state._memories["0"].towers),
            state.describe(),
        )
        for name, state in states.items()
    }


def randomly_compressed(group: Any, num_towers: int, seed: str) -> list[Any]:
    """Returns all towers' sums by a compressor of one's own, in two steps."""
    return random_compressors.reduced(
        *(seed, CPUS[:num_towers], 2),
        first=group.rank * num_towers,
        add=partial(tw_ranks.sum_across, group=group),
        wrap=lambda own: group.bounded(tf.function(own, autograph=False)),
    )


def overflowing(group: Any) -> list[Any]:
    """Has rank 1 bring infinity; returns if memory stayed, and sums are finite.

    Before, all ranks bring finite gradients whose sum overflows; last is if theirs is.
    """
    variables = [[tf.Variable(tf.zeros(own)) for own in SHAPES]]
    add = partial(tw_ranks.sum_across, group=group)
    state = ReducerState(REDUCERS["sign"], variables, add=add)
    run = group.bounded(tf.function(state, autograph=False))
    *grads, _ = map(tf.constant, gradients(0, group.rank))
    [huge] = run([[1e36 * own for own in grads]])
    huge = [bool(np.isfinite(own).all()) for own in huge]
    run([grads])
    before = state.variables[0].numpy()
    grads[1] += np.inf if group.rank == 1 else 0.0
    [sums] = run([grads])
    finite = [bool(np.isfinite(own).all()) for own in sums]
    return [np.array_equal(before, state.variables[0]), finite, huge]
