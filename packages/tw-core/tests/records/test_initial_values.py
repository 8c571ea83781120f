"""Every form of ``initializer`` that ``get_variable`` takes gives a first value."""

# Private import: twenty forms of an initializer, without a store around each.

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core._records.initial_values import initial_value

v1 = tf.compat.v1
F32, F64, I32 = tf.float32, tf.float64, tf.int32


def ones_with_default_shape(shape=(2, 3), dtype=F32):
    return tf.ones(shape, dtype)


def variable(shape, dtype, initializer):
    first = initial_value("w", shape, dtype, initializer)
    return tf.Variable(first.value, dtype=first.dtype)


ONES = {
    "an old instance": v1.ones_initializer(),
    "an old class": v1.ones_initializer,
    "a keras instance": keras.initializers.Ones(),
    "a keras class": keras.initializers.Ones,
    "tensorflow 2's": tf.ones_initializer(),
    "a function": lambda shape, dtype: tf.ones(shape, dtype),
    "with a partition": lambda shape, dtype, partition_info=None: tf.ones(shape, dtype),
    "a partial": functools.partial(
        lambda x, shape, dtype: x * tf.ones(shape, dtype), 1
    ),
    "a function of nothing": lambda: tf.ones([2, 3], F64),
}


@pytest.mark.parametrize("initializer", ONES.values(), ids=ONES.keys())
def test_a_callable_makes_the_shape_and_dtype_asked_for(initializer):
    made = variable([2, 3], F64, initializer)
    assert made.dtype == F64
    np.testing.assert_array_equal(made, np.ones([2, 3]))


VALUES = {
    "an array": np.ones([2, 3], np.float64),
    "a list": [[1.0] * 3] * 2,
    "a whole-number array": np.ones([2, 3], np.int64),
    "a number": 1,
    "a tensor": tf.ones([2, 3], tf.float16),
    "a function of nothing": lambda: tf.ones([2, 3], tf.int32),
}


@pytest.mark.parametrize("initializer", VALUES.values(), ids=VALUES.keys())
def test_a_value_brings_shape_and_dtype_as_in_a_session_graph(initializer):
    made = variable(None, F32, initializer)
    with tf.Graph().as_default():
        if isinstance(initializer, tf.Tensor):
            initializer = initializer.numpy()
        theirs = v1.get_variable("w", initializer=initializer)
    assert (made.shape, made.dtype) == (theirs.shape, theirs.dtype)
    np.testing.assert_array_equal(made, np.ones(made.shape))


def test_a_function_with_defaults_needs_no_shape():
    assert variable(None, F64, ones_with_default_shape).dtype == F32
    assert variable([4], F64, ones_with_default_shape).dtype == F64


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, F32, F64])
def test_floats_start_as_tensorflows_default_does(dtype):
    made = variable([30, 40], dtype, None)
    assert made.dtype == dtype
    bound = np.sqrt(6 / (30 + 40))
    values = tf.cast(made, F64).numpy()
    assert 0.9 * bound < np.abs(values).max() <= bound * 1.01
    assert abs(values.mean()) < 0.05
    for other in (I32, tf.bool, tf.uint8):
        made = variable([3], other, None)
        assert made.dtype == other
        np.testing.assert_array_equal(made, np.zeros([3]))


def ones(shape, dtype):
    return tf.ones(shape, dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "initializer", "says"),
    [
        ([3], tf.string, None, "of dtype string needs an initializer"),
        (None, F32, ones, "has the shape .*; its initializer needs a"),
        ([None, 3], F32, ones, "has the shape .*; its initializer needs a"),
        (tf.TensorShape(None), F32, ones, "has the shape .*; its initializer needs a"),
        ([2], F32, np.ones(2), "has a value as initializer and the shape"),
    ],
)
def test_what_gives_no_value_is_refused(shape, dtype, initializer, says):
    with pytest.raises(ValueError, match=f"'w' {says}"):
        initial_value("w", shape, dtype, initializer)


def test_a_tensor_of_the_function_is_refused_by_name():
    @tf.function(autograph=False)
    def traced():
        initial_value("w", None, F32, tf.random.uniform([2], name="noise"))

    want = "'w' starts with 'noise/.*', a tensor of the tf.function, .*pass a function"
    with pytest.raises(ValueError, match=want):
        traced()
