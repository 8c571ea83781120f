"""Old names and arguments work for one version, with a warning at the caller's line.

Imports the private table of them, so that none is forgotten.
"""

import numpy as np
import pytest
import tensorflow as tf

import tw_ampopt
from tw_ampopt._renamed import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_old_name_gives_the_new_object_and_warns(name):
    new = NAMES[name].removeprefix("tw_ampopt.")
    with pytest.warns(DeprecationWarning, match=rf"{name} is .* use .*\.{new}") as told:
        old = getattr(tw_ampopt, name)
    assert old is getattr(tw_ampopt, new)
    assert told[0].filename == __file__


def test_minibatch_multiplier_still_makes_a_tower_optimizer_accumulate():
    w = tf.Variable([1.0])
    with pytest.warns(DeprecationWarning, match=r"use .*accumulation_steps") as told:
        optimizer = tw_ampopt.TowerOptimizer(
            [w],
            tf_optimizer="tf.train.GradientDescentOptimizer",
            minibatch_multiplier=2,
        )
    assert told[0].filename == __file__
    assert [bool(optimizer.apply([np.ones(1)])) for _ in range(4)] == [False, True] * 2


def test_both_names_of_an_argument_are_refused():
    with (
        pytest.warns(DeprecationWarning),
        pytest.raises(TypeError, match="got both accumulation_steps and minibatch_mu"),
    ):
        tw_ampopt.TowerOptimizer(
            [tf.Variable([1.0])], accumulation_steps=2, minibatch_multiplier=2
        )
