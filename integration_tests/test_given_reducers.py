"""A reducer that is given is called for one tower too: it may add over processes.

Here are those that test_reducers_with_memory.py does not train over one tower.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from programs.rank_groups import Alone

import tw_ampopt
import tw_core
import tw_keras
import tw_rlload
from tw_core.testing import CPUS
from tw_reduce import sum_on_device

v1 = tf.compat.v1
GRADIENT, FACTOR = 1.5, 10.0  # of each tower; and of the reducer, beside the sum
SGD = {"tf_optimizer": v1.train.GradientDescentOptimizer, "learning_rate": 1.0}


class Counting:
    """Adds, multiplies by ``FACTOR``, and counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, grads):
        self.calls += 1
        sums = sum_on_device(grads, device=CPUS[0])
        return [[FACTOR * total for total in own] for own in sums]


def dense():
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    return keras.Sequential([keras.Input([1]), layer])


def with_tower_model(towers, reducer, *, run_eagerly=False, **options):
    model = tw_keras.TowerModel(dense, towers, reducer=reducer, **options)
    optimizer = keras.optimizers.SGD(1.0)
    model.compile(optimizer, lambda y, out: y * out, run_eagerly=run_eagerly)
    rows = np.ones([2 * len(towers), 1], np.float32)
    model.fit(rows, GRADIENT * rows, batch_size=len(rows), verbose=0)
    return model.get_weights()[0].item()


class Policy:
    def __init__(self, inputs):
        self.w = v1.get_variable("w", initializer=0.0)
        self.loss = GRADIENT * self.w * tf.reduce_mean(inputs[0])

    def gradients(self, optimizer):
        return optimizer.compute_gradients(self.loss, [self.w])


def with_local_sync_parallel_optimizer(towers, reducer):
    with tf.Graph().as_default(), v1.Session(config=tw_core.session_config()) as sess:
        trainer = tw_rlload.LocalSyncParallelOptimizer(
            v1.train.GradientDescentOptimizer(1.0),
            [tower.device for tower in towers],
            [v1.placeholder(tf.float32, [None])],
            [],
            2,
            Policy,
            reducer=reducer,
        )
        sess.run(v1.global_variables_initializer())
        trainer.load_data(sess, [np.ones(2 * len(towers), np.float32)], [])
        trainer.optimize(sess, 0)
        return sess.run(trainer.get_common_loss().w)


TAKERS = {
    "TowerModel, eager": lambda *own: with_tower_model(*own, run_eagerly=True),
    "TowerModel, group": lambda *own: with_tower_model(*own, group=Alone()),
    "LocalSyncParallelOptimizer": with_local_sync_parallel_optimizer,
}


@pytest.mark.parametrize("num_towers", [1, 2])
@pytest.mark.parametrize("taker", TAKERS)
def test_a_given_reducer_is_called_for_any_number_of_towers(taker, num_towers):
    reducer = Counting()
    towers = tw_core.towers(CPUS[:num_towers])
    got = TAKERS[taker](towers, reducer)
    assert reducer.calls >= 1
    assert got == -GRADIENT * FACTOR


def test_an_optimizer_over_towers_takes_the_reducer_of_a_tower_model_itself():
    towers = tw_core.towers(CPUS[:2])
    model = tw_keras.TowerModel(dense, towers, reducer=Counting())
    variables = [own.trainable_variables for own in model.towers]
    optimizer = tw_ampopt.TowerOptimizer(variables, **SGD)
    says = r"reducer is not called with TowerOptimizer.*pass the reducer to TowerOpti"
    with pytest.raises(ValueError, match=says):
        model.compile(optimizer, "mse")
