"""What ranks do in ``test_overlap``: a backward pass that waits for an exchange.

The gradients of the last layer are there while those of the first are not. Only if they
are sent meanwhile, the first layer gets to know that an exchange is completed.
"""

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tw_ranks
from tw_builders import RankShardedOptimizer
from tw_core import towers
from tw_keras import TowerModel
from tw_keras._over_ranks.exchanges import Exchanges
from tw_ranks.internal import endpoint_of

WIDTH = 64
BUCKET_BYTES = 4 * WIDTH
_DEADLINE_S = 15.0
_POLL_S = 0.002


class _Wait:
    """Waits, in a backward pass, until exchanges of this step are completed."""

    def __init__(self, group: Any) -> None:
        self._progress = endpoint_of(group).progress
        self.wanted, self.have_met = 0, list[bool]()

    def begin(self, number: int) -> None:
        """Makes the next backward pass wait for this many exchanges from now on."""
        self.wanted = self._progress.read().completed + number

    def __call__(self, grad: np.ndarray) -> np.ndarray:
        end_s = time.monotonic() + _DEADLINE_S * all(self.have_met)
        while self._progress.read().completed < self.wanted:
            if time.monotonic() > end_s:
                self.have_met.append(False)
                return grad
            time.sleep(_POLL_S)
        self.have_met.append(True)
        return grad


def _model(wait: _Wait, *, has_effects: bool) -> keras.Model:
    class Waiting(keras.layers.Dense):
        def call(self, inputs: Any) -> Any:
            @tf.custom_gradient
            def same(x: Any) -> Any:
                def back(grad: Any) -> Any:
                    later = tf.numpy_function(
                        wait, [grad], grad.dtype, stateful=has_effects
                    )
                    return tf.ensure_shape(later, grad.shape)

                return tf.identity(x), back

            return same(super().call(inputs))

    layers = [Waiting(WIDTH), *(keras.layers.Dense(WIDTH) for _ in range(2))]
    return keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(1)])


def has_met(group: Any, kind: str, has_effects: bool) -> list[bool]:
    """Returns, for each step, whether its backward pass met an exchange."""
    wait = _Wait(group)
    make = lambda: _model(wait, has_effects=has_effects)  # noqa: E731
    if kind.startswith("fit"):
        _fit(group, kind, wait, make)
    else:
        _steps(group, kind, wait, make)
    return wait.have_met


def _fit(group: Any, kind: str, wait: _Wait, make: Callable[[], keras.Model]) -> None:
    options = {"variables": "sharded"} if "shards" in kind else {}
    several = 2 if "multi" in kind else 1
    model = TowerModel(make, ["/cpu:0"], group=group, **options)
    model.compile("sgd", "mse", jit_compile=False, steps_per_execution=several)
    begin = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: wait.begin(2)  # The report is first.
    )
    steps = 4 - group.rank * ("uneven" in kind)
    x, y = np.ones([2 * steps, 4], "f"), np.ones([2 * steps, 1], "f")
    model.fit(x, y, batch_size=2, verbose=0, callbacks=[begin])


def _steps(group: Any, kind: str, wait: _Wait, make: Callable[[], keras.Model]) -> None:
    model = make()
    trained = model.trainable_variables
    sharded = None
    if kind == "step, shards":
        sgd = keras.optimizers.SGD()
        sharded = RankShardedOptimizer(towers(["/cpu:0"]), [model], sgd, group=group)

    @group.bounded
    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        grads = tape.gradient(loss, trained)
        if sharded is not None:
            sharded.apply([grads])
            return
        for variable, mean in zip(
            trained, tw_ranks.mean_across([grads], group=group)[0], strict=True
        ):
            variable.assign_sub(0.01 * mean)

    for _ in range(2):
        wait.begin(1)
        step(tf.ones([2, 4]))


def sums_in_any_order(group: Any, late_s: float) -> list[float]:
    """Returns two sums of ones as ``fit`` makes them; each rank is late for one."""

    def late(one: tf.Tensor) -> tf.Tensor:
        def wait(value: np.ndarray) -> np.ndarray:
            time.sleep(late_s)
            return value

        waited = tf.numpy_function(wait, [one], one.dtype, stateful=False)
        return tf.ensure_shape(waited, one.shape)

    def step(one: tf.Tensor) -> list[tf.Tensor]:
        exchanges.begin_step()
        given = [late(one) if n == group.rank else tf.identity(one) for n in range(2)]
        return [exchanges.sum(f"sum {n}", [own])[0] for n, own in enumerate(given)]

    exchanges = Exchanges(group, shares_data=False)
    function = group.bounded(tf.function(step, autograph=False))
    return [total.numpy() for total in function(tf.ones([]))]
