"""Reducers with memory that are made of others: beside those others alone."""

import numpy as np
import pytest
import tensorflow as tf
from reduce_given import steps

from tw_core.testing import CPUS
from tw_reduce import ReducerState
from tw_reduce.compression import after, error_feedback, power_sgd, top_k

F32 = np.float32
# Compressed: the first and the third.
SHAPES = [(64, 80), (7,), (3, 3, 16, 40)]
TOP = error_feedback(top_k(0.01))
RANK = power_sgd(rank=3, seed=5)


def variables(num_towers):
    towers = []
    for device in CPUS[:num_towers]:
        with tf.device(device):
            towers.append([tf.Variable(tf.zeros(shape)) for shape in SHAPES])
    return towers


def gradients(num_towers, seed):
    random = np.random.default_rng(seed)
    return [
        [random.integers(-50, 50, shape).astype(F32) for shape in SHAPES]
        for _ in range(num_towers)
    ]


def stepper(mode, reducer, num_towers):
    """Returns a state, and a function of [K][N] arrays that makes a step with it."""
    made = []

    def make():
        made.append(ReducerState(reducer, variables(num_towers)))
        return made

    def step(*flat_and_state):
        *flat, state = flat_and_state
        count = len(SHAPES)
        return state([flat[n : n + count] for n in range(0, len(flat), count)])

    if mode == "eager":
        [state] = make()
        run = lambda *own: step(*map(tf.constant, own), state)  # noqa: E731
    else:
        run = steps(mode, step, list(map(tf.TensorSpec, SHAPES)) * num_towers, make)

    def run_towers(grads):
        sums = run(*(own for tower in grads for own in tower))
        return [[np.asarray(own) for own in tower] for tower in sums]

    return made[0], run_towers


def same(got, want):
    for own, other in zip(got, want, strict=True):
        for one, wanted in zip(own, other, strict=True):
            np.testing.assert_array_equal(one, wanted)


def added(grads):
    return [[sum(own) for own in zip(*grads, strict=True)]] * len(grads)


@pytest.mark.parametrize("mode", ["graph", "function", "eager"])
@pytest.mark.parametrize("num_towers", [1, 3])
@pytest.mark.parametrize("reducer", [TOP, RANK], ids=["top_k", "power_sgd"])
def test_whole_gradients_are_sent_until_enough_updates_are_made(
    mode, num_towers, reducer
):
    state, step = stepper(mode, after(2, reducer), num_towers)
    alone, step_alone = stepper(mode, reducer, num_towers)
    for seed in range(3):
        grads = gradients(num_towers, seed)
        if seed == 1:  # This update is not made, and does not count.
            grads[-1][1][3] = np.inf
            assert not all(np.isfinite(own).all() for own in step(grads)[0])
        else:
            same(step(grads), added(grads))
    for seed in range(3, 6):
        grads = gradients(num_towers, seed)
        same(step(grads), step_alone(grads))
    # Whether gradients are finite cannot travel with a sum in a branch.
    counted, own = (one.describe().partition(" in ") for one in (state, alone))
    assert counted[0] == own[0]
    assert int(counted[2][0]) == int(own[2][0]) + 1


def test_a_checkpoint_has_the_number_of_updates_for_any_number_of_towers(tmp_path):
    state, step = stepper("function", after(2, RANK), 2)
    for seed in range(3):
        step(gradients(2, seed))
    path = tf.train.Checkpoint(reducer=state).save(str(tmp_path / "state"))
    before = sum(own[0].numpy() for own in state._memories["0"].towers)
    assert before.any()
    for num_towers in (2, 3):
        other, go_on = stepper("function", after(2, RANK), num_towers)
        other.build()
        tf.train.Checkpoint(reducer=other).restore(path)
        kept = sum(own[0].numpy() for own in other._memories["0"].towers)
        np.testing.assert_allclose(kept, before, atol=1e-5)
        grads = gradients(num_towers, 9)
        [[first, *_], *_], want = go_on(grads), added(grads)[0][0]
        assert np.linalg.matrix_rank(first) == 3 < np.linalg.matrix_rank(want)


def test_memory_that_cannot_be_divided_starts_from_zero_with_its_number():
    class Whole:
        init = update = lambda *_: None

    assert hasattr(after(1, RANK), "resize")
    assert not hasattr(after(1, Whole()), "resize")
