"""What ranks that train alone conclude from their reports, and what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_rank import Alone

from tw_builders import ModelAverager
from tw_builders._local_steps.rules import Averaging, Report, agree


def rows(*reports):
    return [Report(*report).row() for report in reports]


def test_ranks_count_by_the_weight_of_their_data_or_their_steps():
    told = agree(rows((4, 30, True, False), (0, 0, False, False), (5, 10, True, False)))
    assert told == Averaging((0.75, 0.0, 0.25), 2, True, False, False)
    told = agree(rows((1, 0, False, False), (3, 0, False, False)))
    assert told == Averaging((0.25, 0.75), 1, True, True, False)
    # Without a step all is as before.
    none = rows((0, 0, False, False), (0, 0, True, False))
    before = agree(rows((2, 1, True, False), (2, 3, True, False)))
    assert agree(none, before) == Averaging((0.25, 0.75), 0, False, False, False)
    assert agree(none).shares == (0.5, 0.5)
    told = agree(rows((1, 1, True, False), (1, 1, True, True)))
    assert (told.is_last, told.stops) == (True, True)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_an_outer_optimizer_descends_the_difference(dtype):
    weights = [tf.Variable([4.0, 8.0], dtype=dtype)]
    outer = tf.compat.v1.train.MomentumOptimizer(0.5, 0.5)
    averager = ModelAverager([weights], group=Alone(), steps=1, outer=outer)
    seen = []
    for _ in range(2):
        weights[0].assign_add([-2.0, 4.0])
        averager.after_step()
        seen.append(weights[0].numpy().astype("float64"))
    weights[0].assign([1.0, 1.0])
    averager.restart()
    averager.finish()  # without a step nothing is applied
    np.testing.assert_equal(seen, [[3.0, 10.0], [1.5, 13.0]])
    np.testing.assert_equal(weights[0].numpy().astype("float64"), [1.0, 1.0])


@pytest.mark.parametrize("outer", [None, keras.optimizers.SGD(0.5)])
def test_whole_numbers_are_left_as_they_are(outer):
    towers = [
        [
            keras.Variable(np.uint32([k, 7])),  # as the seed of a Dropout
            tf.Variable([2.0 + k]),
            tf.Variable(k == 0),
            tf.Variable(k),
        ]
        for k in range(2)
    ]
    averager = ModelAverager(towers, group=Alone(), steps=1, outer=outer)
    towers[0][1].assign([4.0])
    averager.after_step()
    for k, (seed, weight, flag, count) in enumerate(towers):
        assert seed.numpy().tolist() == [k, 7]
        assert weight.numpy() == (4.0 if outer is None else 3.0)
        assert (bool(flag), int(count)) == (k == 0, k)
    averager = ModelAverager([[tf.Variable(3)]], group=Alone(), steps=1)
    assert averager.after_step()
