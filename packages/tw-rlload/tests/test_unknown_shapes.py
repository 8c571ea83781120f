"""Gradients whose shapes are known only when they are computed, in both modes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from rlload_pulled import X, make, session

from tw_core import towers
from tw_core.testing import CPUS
from tw_rlload import DeviceBatch, EpochFunction

v1 = tf.compat.v1


def of_shape_in(variable, flag, shapes):
    """Ones of ``shapes[0]``, or of ``shapes[1]`` where the flag is above 0."""
    one = tf.numpy_function(
        lambda value: np.ones(shapes[int(value > 0)], np.float32), [flag], tf.float32
    )
    assert one.shape.rank is None
    return one


def in_a_session(shapes):
    """Tower 0 has a flag of 0, tower 1 one above; both step once."""

    class Unknown:
        def __init__(self, inputs):
            self.w = v1.get_variable("w", initializer=tf.zeros([2, 3]))
            self.flag = inputs[0][0, 0]
            self.loss = tf.reduce_sum(self.w)

        def gradients(self, optimizer):
            return [(of_shape_in(self.w, self.flag, shapes), self.w)]

    with tf.Graph().as_default():
        optimizer = make(Unknown)
        with session() as sess:
            optimizer.load_data(sess, [X[[0] * 4 + [1] * 4]], [])
            optimizer.optimize(sess, 0)
            optimizer.run_epochs(sess, 1)
            return sess.run(optimizer.get_common_loss().w) * 2  # a rate of 0.5


class Weights(tf.Module):
    def __init__(self):
        super().__init__()
        self.w = tf.Variable(tf.zeros([2, 3]), name="w")


def in_a_function(shapes):
    def loss_fn(model, inputs):
        @tf.custom_gradient
        def total(w):
            flag = inputs["flag"][0]
            return tf.reduce_sum(w), lambda dy: of_shape_in(w, flag, shapes)

        return total(model.w)

    made = towers(list(CPUS[:2]))
    specs = {"flag": tf.TensorSpec([None])}
    batch = DeviceBatch(made, specs, max_per_device_batch_size=1)
    models = [Weights() for _ in made]
    optimizers = [keras.optimizers.SGD(1.0) for _ in made]
    function = EpochFunction(batch, loss_fn, models, optimizers)
    batch.load([np.float32([0, 1])])
    function.optimize(0)
    function.run_epochs(1)
    return models[1].w.numpy()


MODES = pytest.mark.parametrize("train", [in_a_session, in_a_function])


@MODES
def test_gradients_of_unknown_shape_are_averaged(train):
    np.testing.assert_array_equal(train([(2, 3), (2, 3)]), np.full((2, 3), -2.0))


@MODES
@pytest.mark.parametrize(
    ("shapes", "tower"),
    [([(2, 3), (3, 2)], 1), ([(3, 2), (2, 3)], 0), ([(2, 3), (3,)], 1)],
)
def test_another_shape_than_the_variable_fails_by_name_when_it_is_computed(
    train, shapes, tower
):
    message = rf"check_gradient_shape/tower{tower}/w"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        train(shapes)
