"""This package's checks for ``tw-doctor``, which finds them through an entry point.

Every builder trains a linear loss for two steps, and must reach the weights that one
device reaches on the whole batch, computed in NumPy.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

import tw_builders
import tw_core
import tw_reduce

v1 = tf.compat.v1
_RATE, _STEPS = 0.5, 2
_BUILDERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SyncMultiGPUParameterServerBuilder", {"ps_device": "cpu"}),
    ("SyncMultiGPUParameterServerBuilder", {"ps_device": "gpu"}),
    ("SyncMultiGPUReplicatedBuilder", {}),
    ("SyncMultiGPUShardedBuilder", {"average": True}),
    ("AsyncMultiGPUBuilder", {}),
)
_START = (np.array([3.0, -2.0, 1.0]), np.arange(4_096.0) % 8)
_RTOL = 2.0**-9  # twice that of float16
_Step = Callable[[], Any]


def checks(devices: Sequence[str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields each check's name and its function, which raises an error if it fails.

    ``devices``: the towers' devices, at least two.
    """
    for name, arguments in _BUILDERS:
        said = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        yield f"{name}({said})", partial(_check_builder, name, arguments, devices)
    for name, make_step in (
        ("apply_gradients", _replicated_step),
        ("apply_shared_gradients", _shared_step),
        ("apply_sharded_gradients", _sharded_step),
    ):
        yield name, partial(_check_function, make_step, devices)


def _factors(tower: int) -> list[np.ndarray]:
    """Returns a tower's gradients: multiples of 8, so that means are exact."""
    return [start * 0 + 8 * (tower + 1) for start in _START]


def _check_builder(
    name: str, arguments: dict[str, Any], devices: Sequence[str]
) -> None:
    config = tw_core.session_config()
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        builder = getattr(tw_builders, name)(devices, **arguments)
        grads = builder.call_for_each_tower(_tower_pairs)
        built = builder.build(grads, _optimizer)
        train_op, sync_op = built if isinstance(built, tuple) else (built, None)
        session.run(
            [v1.global_variables_initializer(), v1.local_variables_initializer()]
        )
        if sync_op is not None:
            session.run(sync_op)
        for _ in range(_STEPS):
            session.run(train_op)
        copies = session.run([[variable for _, variable in own] for own in grads])
    _compare(copies, _trained(len(devices)), devices)


def _tower_pairs() -> list[tuple[Any, Any]]:
    """Builds a tower's (gradient, variable) pairs in a session graph."""
    tower: Any = tw_core.get_current_tower_context()
    variables = [
        v1.get_variable(f"w{n}", initializer=start.astype(np.float32))
        for n, start in enumerate(_START)
    ]
    loss = _loss(variables, tower.index)
    return list(zip(tf.gradients(loss, variables), variables, strict=True))


def _loss(variables: Sequence[Any], tower: int) -> tf.Tensor:
    factors = [tf.constant(own, tf.float32) for own in _factors(tower)]
    return tf.add_n(
        [tf.reduce_sum(v * f) for v, f in zip(variables, factors, strict=True)]
    )


class _Model(tf.Module):  # type: ignore[misc] # TensorFlow is untyped
    def __init__(self) -> None:
        super().__init__()
        self.weights = [tf.Variable(start, dtype=tf.float32) for start in _START]


def _gradients(tower: tw_core.Tower, model: _Model) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        loss = _loss(model.weights, tower.index)
    return list(tape.gradient(loss, list(model.trainable_variables)))


def _check_function(make_step: Callable[..., _Step], devices: Sequence[str]) -> None:
    towers = tw_core.towers(devices)
    models = tw_core.replicate(towers, lambda tower: _Model())
    step = tf.function(make_step(towers, models), autograph=False)
    for _ in range(_STEPS):
        step()
    used = models[:1] if make_step is _shared_step else models
    copies = [[v.numpy() for v in model.trainable_variables] for model in used]
    _compare(copies, _trained(len(devices)), devices)


def _replicated_step(
    towers: Sequence[tw_core.Tower], models: Sequence[_Model]
) -> _Step:
    optimizers = tw_builders.make_optimizers(towers, _optimizer, models)
    reduce = tw_reduce.mean(tw_reduce.all_reduce([own.device for own in towers]))

    def step() -> None:
        grads = reduce(tw_core.map_towers(_gradients, towers, models))
        tw_builders.apply_gradients(towers, grads, models, optimizers)

    return step


def _shared_step(towers: Sequence[tw_core.Tower], models: Sequence[_Model]) -> _Step:
    (optimizer,) = tw_builders.make_optimizers(towers[:1], _optimizer, models[:1])
    variables = list(models[0].trainable_variables)

    def pairs(tower: tw_core.Tower) -> list[tuple[Any, Any]]:
        return list(zip(_gradients(tower, models[0]), variables, strict=True))

    def step() -> None:
        tw_builders.apply_shared_gradients(tw_core.map_towers(pairs, towers), optimizer)

    return step


def _sharded_step(towers: Sequence[tw_core.Tower], models: Sequence[_Model]) -> _Step:
    optimizer, _ = tw_builders.make_sharded_optimizer(towers, _optimizer, models)

    def step() -> None:
        grads = tw_core.map_towers(_gradients, towers, models)
        tw_builders.apply_sharded_gradients(towers, grads, models, optimizer)

    return step


def _optimizer() -> Any:
    return v1.train.GradientDescentOptimizer(_RATE)


def _trained(num_towers: int) -> list[np.ndarray]:
    """Returns the variables of one device that trains on the mean gradient."""
    by_tower = map(_factors, range(num_towers))
    whole = [sum(own) / num_towers for own in zip(*by_tower, strict=True)]
    return [
        start - _STEPS * _RATE * grad for start, grad in zip(_START, whole, strict=True)
    ]


def _compare(
    copies: Sequence[Sequence[Any]], want: Sequence[np.ndarray], devices: Sequence[str]
) -> None:
    # A mean over a power of two is exact; else it may differ by float16's rounding.
    is_exact = len(devices) & (len(devices) - 1) == 0
    rtol = 0.0 if is_exact else _RTOL
    for k, tower in enumerate(copies):
        for n, (got, wanted) in enumerate(zip(tower, want, strict=True)):
            if not np.allclose(got, wanted, rtol=rtol, atol=rtol / 128):
                raise AssertionError(
                    f"variable {n} of tower {k} is {got} instead of {wanted}"
                )
