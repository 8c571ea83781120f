"""Reducers with memory that are made of others, or number their updates."""

import numpy as np
import pytest
import tensorflow as tf
from reduce_given import steps

from tw_core.testing import CPUS
from tw_reduce import ReducerState, partition
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
    """Equal but for the rounding of PowerSGD's products; others are whole numbers.

    The sums of three towers of two graphs differ in last digits from run to run, with
    one thread, too.
    """
    for own, other in zip(got, want, strict=True):
        for one, wanted in zip(own, other, strict=True):
            np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-3)


def added(grads):
    return [[sum(own) for own in zip(*grads, strict=True)]] * len(grads)


@pytest.mark.slow(by_day=["top_k-1-graph", "power_sgd-3-function"])
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


def route(info):
    """Names a reducer for each variable, by its number of elements."""
    return {7: "whole", 64 * 80: "rank"}.get(info.num_elements, "top_k")


CHOSEN = {"top_k": TOP, "whole": None, "rank": RANK}


@pytest.mark.parametrize("mode", ["graph", "function"])
@pytest.mark.parametrize("num_towers", [1, 3])
def test_variables_have_the_reducers_that_are_chosen_for_them(mode, num_towers):
    _, step = stepper(mode, partition(route, CHOSEN), num_towers)
    _, rank = stepper(mode, RANK, num_towers)
    _, top = stepper(mode, TOP, num_towers)
    for seed in range(3):
        grads = gradients(num_towers, seed)
        three = zip(rank(grads), added(grads), top(grads), strict=True)
        same(step(grads), [[a[0], b[1], c[2]] for a, b, c in three])


def test_memory_by_variable_is_divided_among_other_towers(tmp_path):
    state, step = stepper("function", partition(route, CHOSEN), 2)
    step(gradients(2, 0))
    path = tf.train.Checkpoint(reducer=state).save(str(tmp_path / "state"))
    other, _ = stepper("function", partition(route, CHOSEN), 3)
    other.build()
    tf.train.Checkpoint(reducer=other).restore(path)
    for n in ("0", "2"):
        before, kept = (
            sum(own[0].numpy() for own in one._memories[n].towers)
            for one in (state, other)
        )
        assert before.any()
        np.testing.assert_allclose(kept, before, atol=1e-5)


def test_a_choice_by_variable_holds_where_some_have_no_gradient():
    asked = []
    choose = partition(lambda info: asked.append(info.index) or route(info), CHOSEN)
    state = ReducerState(choose, variables(1))
    [grads] = gradients(1, 0)
    [sums] = state([[None, *map(tf.constant, grads[1:])]])
    assert sums[0] is None
    np.testing.assert_array_equal(sums[1], grads[1])
    assert np.count_nonzero(sums[2]) == np.ceil(0.01 * grads[2].size)
    assert asked == [0, 1, 2]


class Whole:
    init = update = lambda *_: None


def test_memory_that_a_reducer_cannot_divide_starts_from_zero():
    for made in (lambda own: after(1, own), lambda own: partition(route, {"a": own})):
        assert hasattr(made(RANK), "resize")
        assert not hasattr(made(Whole()), "resize")


def test_whole_gradients_may_be_sent_first_for_some_variables():
    chosen = {**CHOSEN, "rank": after(1, RANK)}
    for mixed in (partition(route, chosen), after(1, partition(route, CHOSEN))):
        _, step = stepper("function", mixed, 2)
        firsts = [step(gradients(2, seed))[0][0] for seed in range(2)]
        ranks = list(map(np.linalg.matrix_rank, firsts))
        assert ranks == [64, 3]


def numbered(seeds):
    """Compresses to random elements, the same ones in all towers; notes the seeds."""

    def compress(tensor, seed):
        seeds.append(seed)
        size = tensor.shape.num_elements()
        order = tf.random.experimental.stateless_shuffle(tf.range(size), seed)
        places = order[: size // 10, tf.newaxis]
        sent = tf.gather_nd(tf.reshape(tensor, [-1]), places)

        def read(total):
            return tf.reshape(tf.scatter_nd(places, total, [size]), tensor.shape)

        return [sent], read

    return compress


def test_a_compressor_that_draws_has_a_seed_for_each_variable_and_update():
    seeds, sent = [], []
    reducer = error_feedback(numbered(seeds), draws=True)
    state, step = stepper("eager", reducer, 2)
    total = np.zeros(SHAPES[0], F32)
    for seed in range(3):
        grads = gradients(2, seed)
        if seed == 1:  # This update is not made, and its seed is used again.
            grads[0][1][0] = np.nan
        sums = step(grads)[0][0]
        if seed != 1:
            total += added(grads)[0][0] - sums
            sent.append(sums != 0)
    errors = sum(own[0].numpy() for own in state._memories["0"].towers)
    np.testing.assert_array_equal(total, errors)
    wanted = [[place, n] for n in (0, 1, 1) for _ in range(2) for place in (0, 2)]
    assert [own.numpy().tolist() for own in seeds] == wanted
    assert all(np.count_nonzero(own) <= 512 for own in sent)
    assert not np.array_equal(*sent)


def test_a_traced_step_draws_other_numbers_each_time_as_an_eager_one():
    reducer = error_feedback(numbered([]), draws=True)
    (_, eager), (_, traced) = (stepper(m, reducer, 1) for m in ("eager", "function"))
    for seed in range(3):
        grads = gradients(1, seed)
        same(traced(grads), eager(grads))
