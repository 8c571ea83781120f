"""What a rank does with a backward pass that takes time, layer by layer.

Each layer sleeps before it gives the gradient of its input, so that it takes the same
time on any machine, and none of a processor that the exchange needs.
"""

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from allreduce_rank import EXCHANGE, FIT, OWN_STEP, SHARDED_FIT
from racing import block_of

import tw_ranks
from tw_keras import TowerModel

BACKWARD_S = 2.0
_ROWS = 4
_made: dict[str, Callable[[int], float]] = {}


def make(group: Any, name: str, shapes: list[tuple[int, ...]]) -> float:
    """Makes a contender; returns the sum of its parameters after a step."""
    if name in (FIT, SHARDED_FIT):
        options = {"variables": "sharded"} if name == SHARDED_FIT else {}
        model = TowerModel(lambda: _model(shapes), ["/cpu:0"], group=group, **options)
        model.compile(keras.optimizers.SGD(1e-9), "mse", jit_compile=False)
        _made[name] = lambda steps: _fit(model, steps)
    else:
        model = _model(shapes)
        _made[name] = block_of(_step(group, name, model))
    run(group, name, 1)
    return float(sum(np.sum(own) for own in model.get_weights()))


def run(group: Any, name: str, steps: int) -> float:
    """Runs a block of steps, which begins in all ranks at once; returns its seconds."""
    return _made[name](steps)


def _model(shapes: list[tuple[int, ...]]) -> keras.Model:
    wait_s = BACKWARD_S / len(shapes)

    def wait(grad: np.ndarray) -> np.ndarray:
        time.sleep(wait_s)
        return grad

    class Slow(keras.layers.Layer):  # type: ignore[misc] # untyped
        def __init__(self, shape: tuple[int, ...]) -> None:
            super().__init__()
            self.kernel = self.add_weight(shape, initializer="ones")

        def call(self, inputs: Any) -> Any:
            @tf.custom_gradient
            def scale(x: Any, kernel: Any) -> Any:
                def back(grad: Any) -> Any:
                    later = tf.numpy_function(wait, [grad], grad.dtype, stateful=False)
                    later = tf.ensure_shape(later, grad.shape)
                    return later, tf.fill(kernel.shape, tf.reduce_sum(later))

                return x * tf.reduce_mean(tf.reshape(kernel, [-1])[:4]), back

            return scale(inputs, tf.convert_to_tensor(self.kernel))

    return keras.Sequential([keras.Input([2]), *map(Slow, shapes)])


def _step(group: Any, name: str, model: keras.Model) -> Callable[[], Any]:
    trained = model.trainable_variables

    @group.bounded
    @tf.function
    def step() -> None:
        if name == EXCHANGE:  # A gradient that needs the parameters.
            grads = [1e-30 * tf.convert_to_tensor(own) for own in trained]
        else:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(tf.ones([_ROWS, 2])) ** 2)
            grads = tape.gradient(loss, trained)
        if name in (EXCHANGE, OWN_STEP):
            [grads] = tw_ranks.mean_across([grads], group=group)
        for own, grad in zip(trained, grads, strict=True):
            own.assign_sub(1e-9 * grad)

    return step


def _fit(model: Any, steps: int) -> float:
    """Returns the seconds of the batches, without those in which ``fit`` begins."""
    times: list[float] = []
    timer = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: times.append(-time.perf_counter()),
        on_train_batch_end=lambda batch, logs: times.append(time.perf_counter()),
    )
    ones = np.ones([_ROWS * steps, 2], "float32")
    model.fit(ones, ones, batch_size=_ROWS, verbose=0, callbacks=[timer])
    return sum(times)
