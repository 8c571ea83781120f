"""A model in float64 meets no narrower number: its weights are those of one device."""

import numpy as np
import pytest
import tensorflow as tf
from programs import rank_float64


def check(results, name):
    want, _ = rank_float64.trained(None, name, 0)
    # Keras computes Adam's decays, 0.9 and 0.999, in float32.
    within = 2e-5 if "Adam" in name else 1e-13
    for got, casts in results:
        assert casts == []
        tf.nest.map_structure(
            lambda one, other: np.testing.assert_allclose(one, other, within, within),
            got,
            want,
        )


@pytest.mark.slow(by_day=["fit, weights-2"])
@pytest.mark.parametrize("num_towers", [1, 2, 3])
@pytest.mark.parametrize(
    "name", [*rank_float64.FITS, *rank_float64.MEAN, *rank_float64.OVER_TOWERS]
)
def test_towers_train_in_float64_as_one_device(name, num_towers):
    check([rank_float64.trained(None, name, num_towers)], name)


@pytest.mark.slow(by_day=["fit, weights-2"])
@pytest.mark.parametrize("num_towers", [1, 2])
@pytest.mark.parametrize(
    "name", [*rank_float64.FITS, *rank_float64.MEAN, *rank_float64.SHARDS]
)
def test_ranks_train_in_float64_as_one_device(groups, name, num_towers):
    check(groups(2).call("rank_float64:trained", name, num_towers), name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "build", [rank_float64.epochs, rank_float64.replicas, rank_float64.numbers]
)
def test_other_steps_cast_nothing(build):
    assert build() == []
