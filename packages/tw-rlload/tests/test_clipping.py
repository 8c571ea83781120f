"""Gradients of mixed dtypes are clipped by their global norm as NumPy would."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

v1 = tf.compat.v1
RATE = 0.5
OPTIMIZERS = {
    "keras": lambda: keras.optimizers.SGD(RATE),
    "keras, scaled": lambda: keras.optimizers.SGD(RATE, loss_scale_factor=8.0),
    "keras, scaled by itself": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(RATE), initial_scale=16.0
    ),
    "keras, momentum": lambda: keras.optimizers.SGD(RATE, momentum=0.9),
    "v1": lambda: v1.train.GradientDescentOptimizer(RATE),
    "v1, momentum": lambda: v1.train.MomentumOptimizer(RATE, 0.9),
}
ROUNDED = {"float64": 1e-14, "float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}
X = np.float32([1, 2, 3, 4])  # a row for each of two towers in each of two steps


def pulled(factors):
    """A loss whose gradient by each variable is a factor times the row."""

    def loss_fn(variables, inputs):
        [x] = tf.unstack(inputs["x"], 1)
        terms = [
            tf.cast(tf.reduce_sum(variables[name] * factor), tf.float64)
            for name, factor in factors.items()
        ]
        return tf.add_n(terms) * tf.cast(x, tf.float64)

    return loss_fn


@pytest.fixture
def train(make_trainer, request):
    """Returns the variables after two clipped steps, and what NumPy has for them."""

    def trained(dtypes, optimizer, sizes, bound):
        if "graph" in request.node.name:  # where Keras's are refused
            optimizer = "v1, momentum" if "momentum" in optimizer else "v1"
        factors = {f"v{n}": size for n, size in enumerate(sizes)}
        weights = {
            name: np.zeros([2], tf.as_dtype(dtype).as_numpy_dtype)
            for name, dtype in zip(factors, dtypes, strict=True)
        }
        trainer = make_trainer(
            pulled(factors),
            weights,
            {"x": (np.float32, [])},
            devices=2,
            maximum=1,
            opt=OPTIMIZERS[optimizer],
            grad_norm_clipping=bound,
        )
        trainer.load([X])
        trainer.run_epochs(1)
        want, speed = np.zeros(len(sizes)), np.zeros(len(sizes))
        for row in (X[[0, 2]], X[[1, 3]]):
            grad = np.float64(sizes) * row.mean()
            norm = math.hypot(*grad, *grad)
            speed = 0.9 * speed * ("momentum" in optimizer) + grad * min(
                1, bound / norm
            )
            want -= RATE * speed
        return trainer.weights(), dict(zip(factors, want, strict=True))

    return trained


@pytest.mark.slow(
    by_day=[
        *(
            "function-float64-keras",
            "graph-mixed-v1",
            "function-overflows-keras, momentum",
        ),
        *("function-no factor-keras, scaled", "function-mixed-keras, scaled by itself"),
        *("function-huge-keras", "graph-huge-v1", "function-wide-keras"),
    ]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("variables", "bound"),
    [
        ([("float64", 3)], 0.3),
        ([("float16", 3), ("bfloat16", 2), ("float32", -5), ("float64", 7)], 0.3),
        ([("float16", 400), ("float16", -300)], 100.0),  # squares overflow
        ([("float16", 12), ("float64", 10**9)], 1.0),  # no factor of float16
        ([("float32", 3), ("bfloat16", -2)], 1e6),
        ([("float32", 2.0**116), ("bfloat16", -(2.0**115))], 0.3),
        ([("float64", 1e200), ("float32", 1e30)], 0.3),
    ],
    ids=["float64", "mixed", "overflows", "no factor", "unclipped", "huge", "wide"],
)
def test_variables_of_any_float_dtypes_move_as_in_numpy(
    train, variables, optimizer, bound
):
    dtypes, sizes = zip(*variables, strict=True)
    got, want = train(dtypes, optimizer, sizes, bound)
    for dtype, name in zip(dtypes, got, strict=True):
        assert tf.as_dtype(got[name].dtype).name == dtype
        np.testing.assert_allclose(
            np.float64(got[name]), want[name], rtol=ROUNDED[dtype], atol=1e-7
        )
