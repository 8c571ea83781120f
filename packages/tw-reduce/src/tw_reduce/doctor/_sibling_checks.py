"""Checks of the sibling packages that are installed: builders and gates.

Every builder trains a linear loss for two steps, and must reach the weights that one
device reaches on the whole batch, computed in NumPy; a gate of tw-ampopt must skip a
step whose gradients are not finite, and take the next.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import tensorflow as tf

import tw_core
import tw_reduce
from tw_core.devices import canonical_device
from tw_reduce.doctor._checks import Check, NotHeld, compare

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


def sibling_checks(devices: Sequence[str]) -> Iterator[Check]:
    """Yields checks of the sibling packages that are installed."""
    if find_spec("tw_builders"):
        for name, arguments in _BUILDERS:
            run = partial(_check_builder, name, arguments, devices)
            said = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            yield Check(f"{name}({said})", run)
        for name, make_step in (
            ("apply_gradients", _replicated_step),
            ("apply_shared_gradients", _shared_step),
            ("apply_sharded_gradients", _sharded_step),
        ):
            yield Check(name, partial(_check_function, make_step, devices))
        yield Check("TowerModel", partial(_check_tower_model, devices))
    if find_spec("tw_ampopt"):
        yield Check("TowerOptimizer's gate", partial(_check_gate, devices))
        yield Check("Optimizer's gate", partial(_check_graph_gate, devices))


def _factors(tower: int) -> list[np.ndarray]:
    """Returns a tower's gradients: multiples of 8, so that means are exact."""
    return [start * 0 + 8 * (tower + 1) for start in _START]


def _trained(num_towers: int, steps: int = _STEPS) -> list[np.ndarray]:
    """Returns the variables of one device that trains on the mean gradient."""
    by_tower = map(_factors, range(num_towers))
    whole = [sum(own) / num_towers for own in zip(*by_tower, strict=True)]
    return [
        start - steps * _RATE * grad for start, grad in zip(_START, whole, strict=True)
    ]


def _check_builder(
    name: str, arguments: dict[str, Any], devices: Sequence[str]
) -> None:
    import tw_builders

    with tf.Graph().as_default(), v1.Session(config=_config(devices)) as session:
        builder = getattr(tw_builders, name)(devices, **arguments)
        grads = builder.call_for_each_tower(_tower_pairs)
        built = builder.build(grads, lambda: v1.train.GradientDescentOptimizer(_RATE))
        train_op, sync_op = built if isinstance(built, tuple) else (built, None)
        session.run(
            [v1.global_variables_initializer(), v1.local_variables_initializer()]
        )
        if sync_op is not None:
            session.run(sync_op)
        for _ in range(_STEPS):
            session.run(train_op)
        copies = session.run([[variable for _, variable in own] for own in grads])
    _compare_copies(copies, _trained(len(devices)), devices)


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


def _check_function(
    make_step: Callable[..., Callable[[], Any]], devices: Sequence[str]
) -> None:
    towers = tw_core.towers(devices)
    models = tw_core.replicate(towers, lambda tower: _Model())
    step = tf.function(make_step(towers, models), autograph=False)
    for _ in range(_STEPS):
        step()
    used = models[:1] if make_step is _shared_step else models
    copies = [[v.numpy() for v in model.trainable_variables] for model in used]
    _compare_copies(copies, _trained(len(devices)), devices)


def _replicated_step(
    towers: Sequence[tw_core.Tower], models: Sequence[_Model]
) -> Callable[[], Any]:
    import tw_builders

    optimizers = tw_builders.make_optimizers(towers, _optimizer, models)
    reduce = tw_reduce.mean(tw_reduce.all_reduce([own.device for own in towers]))

    def step() -> None:
        grads = reduce(tw_core.map_towers(_gradients, towers, models))
        tw_builders.apply_gradients(towers, grads, models, optimizers)

    return step


def _shared_step(
    towers: Sequence[tw_core.Tower], models: Sequence[_Model]
) -> Callable[[], Any]:
    import tw_builders

    (optimizer,) = tw_builders.make_optimizers(towers[:1], _optimizer, models[:1])
    variables = list(models[0].trainable_variables)

    def pairs(tower: tw_core.Tower) -> list[tuple[Any, Any]]:
        return list(zip(_gradients(tower, models[0]), variables, strict=True))

    def step() -> None:
        tw_builders.apply_shared_gradients(tw_core.map_towers(pairs, towers), optimizer)

    return step


def _sharded_step(
    towers: Sequence[tw_core.Tower], models: Sequence[_Model]
) -> Callable[[], Any]:
    import tw_builders

    optimizer, _ = tw_builders.make_sharded_optimizer(towers, _optimizer, models)

    def step() -> None:
        grads = tw_core.map_towers(_gradients, towers, models)
        tw_builders.apply_sharded_gradients(towers, grads, models, optimizer)

    return step


def _optimizer() -> Any:
    return v1.train.GradientDescentOptimizer(_RATE)


def _check_tower_model(devices: Sequence[str]) -> None:
    import keras

    import tw_builders

    def make_model() -> Any:
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        return keras.Sequential([keras.Input([2]), dense])

    model = tw_builders.TowerModel(make_model, devices)
    model.compile(keras.optimizers.SGD(0.25), "mse")
    rows = 4 * len(devices)
    x = np.tile(np.eye(2, dtype=np.float32), (rows // 2, 1))
    model.fit(x, np.zeros([rows, 1], np.float32), batch_size=rows, verbose=0)
    # The mean of (w x)^2 over rows, half of them for each weight, has the slope w.
    copies = [[tower.get_weights()[0]] for tower in model.towers]
    _compare_copies(copies, [np.full([2, 1], 0.75)], devices)


def _check_gate(devices: Sequence[str]) -> None:
    import tw_ampopt

    towers = tw_core.towers(devices)
    models = tw_core.replicate(towers, lambda tower: _Model())
    optimizer = tw_ampopt.TowerOptimizer(
        [list(model.trainable_variables) for model in models],
        tf_optimizer=v1.train.GradientDescentOptimizer,
        learning_rate=_RATE,
        loss_scale=tw_ampopt.DynamicLossScale(),
        towers=towers,
    )

    def gradients(tower: tw_core.Tower, model: _Model, factor: Any) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = optimizer.apply_loss_scaling(_loss(model.weights, tower.index))
        grads = tape.gradient(loss, list(model.trainable_variables))
        return [grad * factor for grad in grads]

    def step(factors: Sequence[tf.Tensor]) -> tf.Tensor:
        return optimizer.apply(tw_core.map_towers(gradients, towers, models, factors))

    call = tf.function(step, autograph=False)
    ones = [tf.ones([]) for _ in towers]
    taken = [bool(call([*ones[:-1], tf.constant(np.inf)])), bool(call(ones))]
    if taken != [False, True]:
        raise NotHeld(
            f"a step that is not finite and one that is were taken {taken} instead of "
            "[False, True]"
        )
    copies = [[v.numpy() for v in model.trainable_variables] for model in models]
    _compare_copies(copies, _trained(len(devices), steps=1), devices)


def _check_graph_gate(devices: Sequence[str]) -> None:
    import tw_ampopt

    with tf.Graph().as_default(), v1.Session(config=_config(devices)) as session:
        optimizer = tw_ampopt.Optimizer(
            tf_optimizer=v1.train.GradientDescentOptimizer,
            learning_rate=_RATE,
            loss_scale=tw_ampopt.DynamicLossScale(),
        )
        factor = v1.placeholder_with_default(1.0, [])
        copies = []
        for k, device in enumerate(devices):
            with tf.device(device):
                weights = [tf.Variable(start, dtype=tf.float32) for start in _START]
                loss = _loss(weights, k) * (factor if k else 1.0)
            optimizer.register_gradients(loss, weights)
            copies.append(weights)
        train_op = optimizer.apply_updates()
        session.run(v1.global_variables_initializer())
        session.run(train_op, {factor: np.inf})
        session.run(train_op)
        _compare_copies(session.run(copies), _trained(len(devices), steps=1), devices)


def _compare_copies(
    copies: Sequence[Sequence[Any]], want: Sequence[np.ndarray], devices: Sequence[str]
) -> None:
    for k, tower in enumerate(copies):
        for n, (got, wanted) in enumerate(zip(tower, want, strict=True)):
            what = f"variable {n} of tower {k}"
            compare(what, got, wanted, num_towers=len(devices))


def _config(devices: Sequence[str]) -> Any:
    """Returns a session's config for CPU towers; None for GPUs, configured already."""
    is_cpu = all("CPU" in canonical_device(device) for device in devices)
    return tw_core.session_config(num_cpus=len(devices)) if is_cpu else None
