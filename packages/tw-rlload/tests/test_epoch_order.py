"""Orders of epochs: complete, and repeatable from a seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tw_rlload import epoch_order, plan_load


@st.composite
def plans(draw):
    num_devices, length = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sequences = draw(st.integers(num_devices, 40))
    return plan_load(
        sequences * length,
        sequences,
        num_devices=num_devices,
        max_per_device_batch_size=draw(st.integers(length, 12)),
        remainder=draw(st.sampled_from(["drop", "pad"])),
    )


@given(plans(), st.integers(1, 4), st.sampled_from([None, "minibatches", "rows"]))
def test_every_minibatch_and_sequence_comes_once_an_epoch(plan, num_epochs, shuffle):
    order = epoch_order(plan, num_epochs, shuffle, seed=0)
    assert order.steps.shape == (num_epochs, plan.steps)
    for epoch in order.steps:
        assert sorted(epoch) == list(range(plan.steps))
    if shuffle != "rows":
        return
    shape = (plan.steps, plan.num_devices, plan.sequences_per_device_step)
    assert order.sequences.shape == (num_epochs, *shape)
    for epoch in order.sequences:
        for k in range(plan.num_devices):
            assert sorted(epoch[:, k].ravel()) == list(range(plan.sequences_per_device))


def big_plan():
    return plan_load(640, num_devices=2, max_per_device_batch_size=10)


@pytest.mark.parametrize("shuffle", ["minibatches", "rows"])
def test_the_seed_decides_the_order(shuffle):
    first, same, other = (
        epoch_order(big_plan(), 3, shuffle, seed=seed) for seed in (7, 7, 8)
    )
    field = "steps" if shuffle == "minibatches" else "sequences"
    np.testing.assert_array_equal(getattr(first, field), getattr(same, field))
    assert not np.array_equal(getattr(first, field), getattr(other, field))
    drawn = epoch_order(big_plan(), 3, shuffle)
    assert drawn.seed != epoch_order(big_plan(), 3, shuffle).seed
    again = epoch_order(big_plan(), 3, shuffle, seed=drawn.seed)
    np.testing.assert_array_equal(getattr(drawn, field), getattr(again, field))


def test_epochs_and_devices_have_orders_of_their_own():
    sequences = epoch_order(big_plan(), 2, "rows", seed=0).sequences
    assert not np.array_equal(sequences[0], sequences[1])
    assert not np.array_equal(sequences[:, :, 0], sequences[:, :, 1])
    steps = epoch_order(big_plan(), 2, "minibatches", seed=0).steps
    assert not np.array_equal(steps[0], steps[1])


def test_without_shuffling_the_order_is_that_of_loading():
    order = epoch_order(big_plan(), 2)
    np.testing.assert_array_equal(order.steps, [range(32)] * 2)
    assert (order.shuffle, order.seed, order.sequences) == (None, None, None)
