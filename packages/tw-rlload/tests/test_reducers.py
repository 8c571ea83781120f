"""A reducer adds and the trainer divides, in both modes."""

import numpy as np
import pytest
import tensorflow as tf
from rlload_regression import REGRESSION, START, descent, regression_rows

from tw_reduce import mean, packed, sum_on_device


def regression(variables, inputs):
    error = tf.linalg.matvec(inputs["x"], variables["w"]) - inputs["y"]
    return tf.reduce_mean(tf.square(error))


def trained(make_trainer, reducer, **options):
    trainer = make_trainer(
        *(regression, {"w": START}, REGRESSION),
        opt=descent(),
        reducer=reducer,
        **options,
    )
    trainer.load(regression_rows(16))
    trainer.run_epochs(2)
    return trainer.weights()["w"]


def added(grads):
    return sum_on_device(grads, device="/cpu:0")


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.each_choice
def test_the_sum_is_divided_by_the_number_of_towers(make_trainer, devices):
    def doubled(grads):
        return [[2 * grad for grad in tower] for tower in added(grads)]

    got = trained(make_trainer, added, devices=devices, maximum=16 // devices)
    wanted = trained(make_trainer, None, devices=1, maximum=16)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    twice = trained(make_trainer, doubled, devices=devices, maximum=16 // devices)
    assert not np.allclose(twice, wanted)


@pytest.mark.parametrize(
    "means", [mean(added), packed(mean(added))], ids=["mean", "packed mean"]
)
@pytest.mark.each_choice
def test_a_reducer_of_means_is_refused(make_trainer, means):
    with pytest.raises(ValueError, match=r"reducer averages already, and its means"):
        trained(make_trainer, means)
