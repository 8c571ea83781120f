"""What a rank does with a backward pass that takes time, layer by layer.

Each layer sleeps before it gives the gradient of its input, so that it takes the same
time on any machine, and none of a processor that the exchange needs. Or it is that of a
network, on one processor for each rank.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from allreduce_rank import EXCHANGE, FIT, OWN_STEP, SHARDED_FIT
from overlap_networks import make_data, make_network
from racing import block_of

import tw_ranks
from tw_keras import TowerModel

BACKWARD_S = 2.0
_RATE = 1e-9
_made: dict[str, Callable[[int], float]] = {}


def make(group: Any, name: str, work: Any) -> float:
    """Makes a contender; returns the sum of its parameters after a step."""
    if work.network:
        _use_one_processor(group.rank)
    loss: Any = "mse"
    if work.network:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if name in (FIT, SHARDED_FIT):
        options = {"variables": "sharded"} if name == SHARDED_FIT else {}
        model = TowerModel(lambda: _model(work), ["/cpu:0"], group=group, **options)
        model.compile(keras.optimizers.SGD(_RATE), loss, jit_compile=False)
        _made[name] = lambda steps: _fit(model, work, steps)
    else:
        model = _model(work)
        loss = keras.losses.get(loss)
        _made[name] = block_of(_step(group, name, model, loss, _data(work, 1)))
    run(group, name, 1)
    return float(np.float32(sum(np.sum(own, dtype="d") for own in model.get_weights())))


def _use_one_processor(rank: int) -> None:
    """Moves all threads of this process to one processor."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {rank % (os.cpu_count() or 1)})


def run(group: Any, name: str, steps: int) -> float:
    """Runs a block of steps, which begins in all ranks at once; returns its seconds."""
    return _made[name](steps)


def _data(work: Any, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of some steps, and targets."""
    if work.network:
        return make_data(work.network, work.rows * steps)
    ones = np.ones([work.rows * steps, 2], "float32")
    return ones, ones


def _model(work: Any) -> keras.Model:
    if work.network:
        keras.utils.set_random_seed(0)
        return make_network(work.network)
    wait_s = BACKWARD_S / len(work.shapes)

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

    return keras.Sequential([keras.Input([2]), *map(Slow, work.shapes)])


def _step(
    group: Any, name: str, model: keras.Model, loss: Any, data: Any
) -> Callable[[], Any]:
    trained = model.trainable_variables
    x, y = map(tf.Variable, data)  # A constant would be computed with once.
    sgd = keras.optimizers.SGD(_RATE)
    sgd.build(trained)

    @group.bounded
    @tf.function
    def step() -> None:
        if name == EXCHANGE:  # A gradient that needs the parameters.
            grads = [1e-30 * tf.convert_to_tensor(own) for own in trained]
        else:
            with tf.GradientTape() as tape:
                value = loss(y, model(x, training=True))
            grads = tape.gradient(value, trained)
        if name in (EXCHANGE, OWN_STEP):
            [grads] = tw_ranks.mean_across([grads], group=group)
        sgd.apply(grads, trained)

    return step


def _fit(model: Any, work: Any, steps: int) -> float:
    """Returns the seconds of the batches behind the first of a ``fit``.

    That one also waits for ranks that get the weights of rank 0 later.
    """
    times: list[float] = []
    timer = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: times.append(-time.perf_counter()),
        on_train_batch_end=lambda batch, logs: times.append(time.perf_counter()),
    )
    x, y = _data(work, steps + 1)
    model.fit(x, y, batch_size=work.rows, verbose=0, callbacks=[timer])
    return sum(times[2:])
