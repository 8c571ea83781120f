"""Checks of this package for ``tw-doctor``, which finds them by an entry point.

A gate must skip a step whose gradients are not finite in one tower, and apply the next.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

import tw_ampopt
import tw_core

v1 = tf.compat.v1
_RATE, _START = 0.5, np.arange(4_096.0, dtype=np.float32) % 8


def checks(devices: Sequence[str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields the name of each check and its function, which raises if the check fails.

    ``devices`` are those of the towers, at least two.
    """
    yield "TowerOptimizer's gate", partial(_check_gate, devices)
    yield "Optimizer's gate", partial(_check_graph_gate, devices)


def _check_gate(devices: Sequence[str]) -> None:
    towers = tw_core.towers(devices)
    copies = tw_core.map_towers(lambda _: tf.Variable(_START), towers)
    optimizer = tw_ampopt.TowerOptimizer(
        [[weights] for weights in copies], towers=towers, **_settings()
    )

    def gradients(tower: tw_core.Tower, weights: Any, factor: Any) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = optimizer.apply_loss_scaling(_loss(weights, tower.index))
        return [tape.gradient(loss, weights) * factor]

    def step(factors: Sequence[tf.Tensor]) -> tf.Tensor:
        return optimizer.apply(tw_core.map_towers(gradients, towers, copies, factors))

    call = tf.function(step, autograph=False)
    ones = [tf.ones([]) for _ in towers]
    taken = [bool(call([*ones[:-1], tf.constant(np.inf)])), bool(call(ones))]
    if taken != [False, True]:
        raise AssertionError(
            f"a non-finite and a finite step returned {taken} for whether they were "
            "applied, instead of [False, True]"
        )
    _compare([weights.numpy() for weights in copies])


def _check_graph_gate(devices: Sequence[str]) -> None:
    config = tw_core.session_config()
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        optimizer = tw_ampopt.Optimizer(**_settings())
        factor = v1.placeholder_with_default(1.0, [])
        copies = []
        for k, device in enumerate(devices):
            with tf.device(device):
                weights = tf.Variable(_START)
                loss = _loss(weights, k) * (factor if k else 1.0)
            optimizer.register_gradients(loss, [weights])
            copies.append(weights)
        train_op = optimizer.apply_updates()
        session.run(v1.global_variables_initializer())
        session.run(train_op, {factor: np.inf})
        session.run(train_op)
        _compare(session.run(copies))


def _settings() -> dict[str, Any]:
    return {
        "tf_optimizer": v1.train.GradientDescentOptimizer,
        "learning_rate": _RATE,
        "loss_scale": tw_ampopt.DynamicLossScale(),
    }


def _loss(weights: tf.Variable, tower: int) -> tf.Tensor:
    # The gradient is a multiple of 8, so that means over 2, 4 and 8 towers are exact.
    return 8.0 * (tower + 1) * tf.reduce_sum(weights)


def _compare(copies: Sequence[np.ndarray]) -> None:
    mean = 8 * (len(copies) + 1) / 2
    want = _START - _RATE * mean
    for k, got in enumerate(copies):
        if not np.allclose(got, want, rtol=1e-6):
            raise AssertionError(
                f"the variable of tower {k} is {got} instead of {want}"
            )
