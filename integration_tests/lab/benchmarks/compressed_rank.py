"""What a rank does with its uncompressed step and those with reducers that send less.

Gradients are normal random numbers, different in each tensor and rank.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf
from allreduce_rank import (
    CHECKED_STEPS,
    FUNCTION,
    INT8,
    LOW_RANK,
    SAMPLED,
    SIGN,
    TOP,
    apply_momentum,
)
from racing import block_of

import tw_ranks
from tw_reduce import ReducerState
from tw_reduce import compression as c

_made: dict[str, Callable[[], Any]] = {}


def make(group: Any, name: str, work: Any) -> float:
    """Makes a contender; returns the sum of its parameters after some steps."""
    reducers = {
        LOW_RANK: c.power_sgd(rank=4),
        INT8: c.error_feedback(c.int8()),
        TOP: c.error_feedback(c.top_k(0.01)),
        SAMPLED: c.error_feedback(c.top_k(0.01, sampled=True)),
        SIGN: c.error_feedback(c.sign()),
    }
    found = [tf.Variable(tf.ones(shape)) for shape in work.shapes]
    momenta = [tf.Variable(tf.zeros(shape)) for shape in work.shapes]
    noise = [
        tf.Variable(tf.random.stateless_normal(shape, [group.rank, n]))
        for n, shape in enumerate(work.shapes)
    ]
    add = partial(tw_ranks.sum_across, group=group)
    state = None if name == FUNCTION else ReducerState(reducers[name], [found], add=add)

    @group.bounded
    @tf.function
    def step() -> None:
        # A gradient that needs the parameters.
        grads = [own + 1e-30 * v for own, v in zip(noise, found, strict=True)]
        if state is None:
            [means] = tw_ranks.mean_across([grads], group=group)
        else:
            [means] = state([[own / group.size for own in grads]])
        apply_momentum(found, momenta, means)

    _made[name] = step
    run(group, name, CHECKED_STEPS)
    return float(sum(tf.reduce_sum(own) for own in found))


def run(group: Any, name: str, steps: int) -> float:
    """Runs a block of steps, which begins in all ranks at once; returns its seconds."""
    return block_of(_made[name])(steps)
