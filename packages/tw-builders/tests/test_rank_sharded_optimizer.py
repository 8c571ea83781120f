"""An optimizer in shards over a group of one: its arithmetic, and wrong calls."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_rank import Alone

from tw_builders import RankShardedOptimizer
from tw_core import towers
from tw_core.testing import CPUS

OURS = towers(CPUS[:2])


def replicas(*values):
    made = []
    for tower in OURS:
        with tf.device(tower.device):
            made.append([tf.Variable(value, dtype=tf.float32) for value in values])
    return made


def sharded(optimizer=None, *values):
    models = replicas(*(values or ([1.0, 2.0], [[3.0], [4.0]])))
    optimizer = optimizer or keras.optimizers.SGD(1.0)
    return RankShardedOptimizer(OURS, models, optimizer, group=Alone()), models


def read(models):
    return [[own.numpy().tolist() for own in model] for model in models]


def grads(scale=1.0):
    return [scale * tf.constant([1.0, 3.0]), tf.constant([[2.0], [4.0]])]


def test_it_divides_by_towers_or_weights_or_not():
    for options, want in (
        ({}, [-1.0, -4.0]),
        ({"average": False}, [-3.0, -10.0]),
        ({"weights": [1, 3]}, [-1.5, -5.5]),
        ({"weights": [0, 0]}, [1.0, 2.0]),
    ):
        optimizer, models = sharded()
        optimizer.apply([grads(), grads(3.0)], **options)
        assert read(models)[0][0] == want
        assert read(models)[0] == read(models)[1]


def test_a_variable_without_gradient_is_left_alone():
    optimizer, models = sharded()
    optimizer.apply([[None, own[1]] for own in (grads(), grads())])
    assert read(models)[1] == [[1.0, 2.0], [[1.0], [0.0]]]
    with pytest.raises(ValueError, match="in every tower or in none; got None in some"):
        optimizer.apply([grads(), [None, grads()[1]]])


def test_sparse_rows_find_the_shard_that_has_them():
    optimizer, models = sharded(None, np.zeros([5, 2]), [1.0])
    rows = [
        tf.IndexedSlices(tf.ones([2, 2]), tf.constant(own), tf.constant([5, 2]))
        for own in ([0, 4], [4, 4])
    ]
    optimizer.apply([[own, tf.zeros([1])] for own in rows], average=False)
    assert read(models)[1][0] == [[-1, -1], [0, 0], [0, 0], [0, 0], [-3, -3]]


def test_a_sum_of_half_precision_does_not_overflow():
    half = tf.Variable(tf.zeros([2], tf.float16))
    alone = towers(CPUS[:1])
    optimizer = RankShardedOptimizer(
        alone, [[half]], keras.optimizers.SGD(1.0), group=Alone()
    )
    optimizer.apply([[tf.constant([6e4, 1.0], tf.float16)]], weights=[100])
    np.testing.assert_equal(half.numpy(), np.float16([-6e4, -1.0]))


def test_a_learning_rate_is_restored_with_the_rest():
    optimizer, _ = sharded(keras.optimizers.Adam(0.1))
    optimizer.apply([grads(), grads()])
    whole = optimizer.gather()
    assert [tuple(own.shape) for own in whole._momentums] == [(2,), (2, 1)]
    other, _ = sharded(keras.optimizers.Adam(0.5))
    other.scatter(whole)
    assert float(other.optimizer.learning_rate) == np.float32(0.1)
    assert int(other.optimizer.iterations) == 1
    again = other.gather()
    for one, two in zip(again.variables, whole.variables, strict=True):
        np.testing.assert_array_equal(one, two)


def test_averages_are_given_at_the_end():
    ema = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
    optimizer, models = sharded(ema)
    for _ in range(2):
        optimizer.apply([grads(), grads()])
    optimizer.finalize()  # to the mean of 0, with which Keras begins, and -1
    assert read(models)[0][0][0] == read(models)[1][0][0] == -0.5


@pytest.mark.parametrize(
    ("optimizer", "error", "says"),
    [
        (keras.optimizers.SGD, TypeError, "got the class SGD"),
        (tf.compat.v1.train.AdamOptimizer(), TypeError, "a Keras 3 one.*got Adam"),
        ("built", ValueError, "is already built, for whole variables; pass a new SGD"),
        ("many", ValueError, "MultiOptimizer holds several optimizers, each of some"),
    ],
)
def test_optimizers_that_shards_cannot_have_are_refused(optimizer, error, says):
    if optimizer == "built":
        optimizer = keras.optimizers.SGD()
        optimizer.build(replicas([1.0])[0])
    elif optimizer == "many":
        own = getattr(keras.optimizers, "MultiOptimizer", None)
        if own is None:
            pytest.skip("this Keras has none")
        rest = keras.optimizers.SGD(0.1)
        optimizer = own(keras.optimizers.OptimizerMap(rest, {"words.*": rest}))
    with pytest.raises(error, match=says):
        sharded(optimizer)


def test_calls_at_the_wrong_place_are_refused():
    says = "outside of tf.function and session graphs; only apply"
    optimizer, _ = sharded()
    whole = optimizer.gather()
    for call in (optimizer.gather, optimizer.finalize, sharded):
        with pytest.raises(RuntimeError, match=says):
            tf.function(call, autograph=False)()
    with pytest.raises(RuntimeError, match=says):
        tf.function(lambda: optimizer.scatter(whole), autograph=False)()
    with tf.Graph().as_default():
        with pytest.raises(TypeError, match="does not work in a session graph"):
            optimizer.apply([grads(), grads()])
        with pytest.raises(RuntimeError, match=says):
            RankShardedOptimizer(
                OURS, replicas([1.0]), keras.optimizers.SGD(), group=Alone()
            )


def test_each_rank_may_save_its_own_part(tmp_path):
    optimizer, _ = sharded(keras.optimizers.Adam(0.1))
    optimizer.apply([grads(), grads()])
    path = tf.train.Checkpoint(optimizer=optimizer.optimizer).write(f"{tmp_path}/own")
    other, _ = sharded(keras.optimizers.Adam(0.5))
    tf.train.Checkpoint(optimizer=other.optimizer).read(path).assert_consumed()
    pairs = zip(other.optimizer.variables, optimizer.optimizer.variables, strict=True)
    for one, two in pairs:
        np.testing.assert_array_equal(one, two)
    with pytest.raises(ValueError, match="trackable"):
        tf.train.Checkpoint(optimizer=optimizer)
