"""Updates by the mean over the ranks of a group."""

import numpy as np
import pytest
import tensorflow as tf

import tw_ampopt
from tw_core.testing import CPUS, run_in_function
from tw_reduce import compression


class Group:
    """Two ranks, of which the other one brings three times as much."""

    rank, size = 0, 2

    def __init__(self):
        self.seen = tf.Variable(0)  # exchanges

    def sum(self, tensors, *, names=()):
        assert len(names) == len(tensors)
        self.seen.assign_add(1)
        return [4.0 * own for own in tensors]

    def broadcast(self, variables):
        raise NotImplementedError

    def bounded(self, function):
        raise NotImplementedError

    def tell(self, what):
        raise NotImplementedError

    wait_for = tell


def made(**options):
    copies = []
    for device in CPUS[:2]:
        with tf.device(device):
            copies.append([tf.Variable([[8.0, 8.0]])])
    optimizer = tw_ampopt.TowerOptimizer(
        copies,
        tf_optimizer="tf.train.GradientDescentOptimizer",
        learning_rate=1.0,
        **options,
    )
    return copies, optimizer


def eagerly(function, *arguments):
    return function(*arguments)


def of_towers(*numbers):
    return [[tf.fill([1, 2], number)] for number in numbers]


GIVEN = {
    "none": None,
    "without memory": lambda grads: (
        [[tf.add_n(list(c)) for c in zip(*grads, strict=True)]] * 2
    ),
    "with memory": compression.error_feedback(
        lambda own: ([own], lambda total: total), min_elements=1
    ),
}


@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize("run", [eagerly, run_in_function])
def test_an_update_is_by_the_mean_over_ranks_and_exchanges_once(run, kind):
    copies, optimizer = made(accumulation_steps=2, reducer=GIVEN[kind])
    group = Group()
    for numbers, updates in [((1.0, 2.0), 0), ((0.0, 3.0), 1)]:
        apply = lambda *own: optimizer.apply([[g] for g in own], group=group)  # noqa: E731
        assert bool(run(apply, *(g for [g] in of_towers(*numbers)))) == bool(updates)
        assert int(group.seen) == updates
        assert optimizer.progress == (1 - updates, 2)
    # The mean of this rank is 1.5, and that of the other 4.5.
    for [own] in copies:
        np.testing.assert_array_equal(own.numpy(), [[5.0, 5.0]])


def test_an_update_of_each_call_exchanges_too():
    copies, optimizer = made(loss_scale=tw_ampopt.DynamicLossScale(init=2))
    assert optimizer.progress is None
    group = Group()
    optimizer.average_accumulated(group)
    optimizer.apply(of_towers(4.0, 8.0), weights=[1, 3], group=group)
    np.testing.assert_array_equal(copies[1][0].numpy(), [[4.5, 4.5]])
    assert int(group.seen) == 1


def test_ranks_drop_a_micro_batch_together():
    class Bad(Group):
        def sum(self, tensors, *, names=()):
            return [own + 1.0 for own in tensors]  # a flag of the other rank

    _, optimizer = made(accumulation_steps=2, on_nonfinite="drop_micro_batch")
    optimizer.apply(of_towers(1.0, 1.0), group=Bad())
    assert int(optimizer.statistics()["micro_batches_dropped"]) == 1
    assert optimizer.progress == (1, 2)


@pytest.mark.parametrize("run", [eagerly, run_in_function])
def test_what_ranks_have_accumulated_becomes_the_mean_of_each(run):
    copies, optimizer = made(accumulation_steps=2)
    group = Group()

    def average():
        optimizer.average_accumulated(group)
        return tf.constant(0)

    run(average)
    assert int(group.seen) == 0
    optimizer.apply(of_towers(1.0, 2.0))
    run(average)
    assert int(group.seen) == 1
    optimizer.apply(of_towers(0.0, 0.0))
    for [own] in copies:  # by 3 times 4 / 2 in place of 3
        np.testing.assert_array_equal(own.numpy(), [[6.5, 6.5]])
