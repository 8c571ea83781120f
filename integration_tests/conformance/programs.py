"""How the rows of the conformance table train: by builder classes, or by functions.

Each program trains the models of all kinds in one graph and session, or in one
``tf.function``, and gives every copy of every variable.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

import tw_builders
import tw_core
from conformance.models import DECAY, KINDS, STEPS, gradients, inputs, specs, start
from tw_core.testing import CPUS

v1 = tf.compat.v1

Copies = dict[str, list[list[np.ndarray]]]  # kind -> [copies][N]
MakeOptimizer = Callable[
    [float, Any], Any
]  # of the decay of momentum and [N] variables


def in_session(
    make_builder: Callable[[Sequence[str]], Any],
    make_optimizer: MakeOptimizer,
    has_momentum: bool,
    num_towers: int,
) -> Copies:
    """Trains the models of all kinds in one session, with an optimizer each."""
    builder = make_builder(CPUS[:num_towers])
    config = v1.ConfigProto(device_count={"CPU": len(CPUS)})
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        known = {kind: specs(kind, num_towers) for kind in KINDS}
        fed = tf.nest.map_structure(placeholder, known)
        built = builder.call_for_each_tower(partial(tower_pairs, fed))
        train_ops, sync_ops = [], []
        for kind in KINDS:
            pairs = [tower[kind] for tower in built]
            decay = DECAY.get(kind, 0.0) if has_momentum else 0.0
            ops = builder.build(pairs, partial(make_optimizer, decay, None))
            train_op, *sync = ops if isinstance(ops, tuple) else (ops,)
            train_ops.append(train_op)
            sync_ops += [op for op in sync if op is not None]
        init = [v1.global_variables_initializer(), v1.local_variables_initializer()]
        session.run(init)
        session.run(sync_ops[-1:])  # the last one copies all that came before
        for step in range(STEPS):
            given = {kind: inputs(kind, num_towers, step) for kind in KINDS}
            pairs = zip(tf.nest.flatten(fed), tf.nest.flatten(given), strict=True)
            session.run(train_ops, dict(pairs))
        own = {id(tower[kind][0][1]) for tower in built for kind in KINDS}
        copies = built if len(own) > len(KINDS) else built[:1]
        variables = {
            kind: [[v for _, v in tower[kind]] for tower in copies] for kind in KINDS
        }
        return session.run(variables)


def tower_pairs(fed: dict[str, Any]) -> dict[str, Any]:
    """Builds one tower's models of all kinds; their (gradient, variable) pairs."""
    k = tw_core.get_current_tower_context().index
    pairs = {}
    for kind, parts in KINDS.items():
        with v1.variable_scope(kind):
            first = v1.constant_initializer(1 + k)
            variables = [
                v1.get_variable(f"v{n}", part.shape, part.dtype, first)
                for n, part in enumerate(parts)
            ]
        grads = gradients(variables, fed[kind][k])
        pairs[kind] = list(zip(grads, variables, strict=True))
    return pairs


def placeholder(spec: tf.TensorSpec) -> tf.Tensor:
    return v1.placeholder(spec.dtype, spec.shape)


class Model(tf.Module):
    """The variables of one kind."""

    def __init__(self, kind: str, tower: tw_core.Tower) -> None:
        super().__init__()
        self.parts = [tf.Variable(start(p, tower.index)) for p in KINDS[kind]]


def in_function(
    make_reducer: Callable[[int], Any], make_optimizer: MakeOptimizer, num_towers: int
) -> Copies:
    """Trains replicas of the models of all kinds in one ``tf.function``."""
    towers, reduce = tw_core.towers(CPUS[:num_towers]), make_reducer(num_towers)
    models = {kind: tw_core.replicate(towers, partial(Model, kind)) for kind in KINDS}
    optimizers = {
        kind: optimizers_of(kind, make_optimizer, towers, models[kind])
        for kind in KINDS
    }

    @tf.function(autograph=False, input_signature=signature(num_towers))
    def step(given: dict[str, Any]) -> None:
        for kind, own in models.items():
            grads = tw_core.map_towers(
                lambda tower, model, x: gradients(model.parts, x),
                towers,
                own,
                given[kind],
            )
            tw_builders.apply_gradients(towers, reduce(grads), own, optimizers[kind])

    take_steps(step, num_towers)
    return {
        kind: [[v.numpy() for v in model.parts] for model in own]
        for kind, own in models.items()
    }


def in_sharded_function(
    average: bool, make_optimizer: MakeOptimizer, num_towers: int
) -> Copies:
    """Trains replicas whose variables have an owner each in one ``tf.function``."""
    towers = tw_core.towers(CPUS[:num_towers])
    models = {kind: tw_core.replicate(towers, partial(Model, kind)) for kind in KINDS}
    optimizers = {}
    for kind, own in models.items():
        owners = tw_builders.owned_variables(towers, own)
        make = partial(make_optimizer, DECAY.get(kind, 0.0), owners)
        optimizers[kind], _ = tw_builders.make_sharded_optimizer(towers, make, own)

    @tf.function(autograph=False, input_signature=signature(num_towers))
    def step(given: dict[str, Any]) -> None:
        for kind, own in models.items():
            grads = tw_core.map_towers(
                lambda tower, model, x: gradients(model.parts, x),
                towers,
                own,
                given[kind],
            )
            tw_builders.apply_sharded_gradients(
                towers, grads, own, optimizers[kind], average=average
            )

    take_steps(step, num_towers)
    return {
        kind: [[v.numpy() for v in model.parts] for model in own]
        for kind, own in models.items()
    }


def in_shared_function(
    average: bool, make_optimizer: MakeOptimizer, num_towers: int
) -> Copies:
    """Trains one set of variables that all towers share in one ``tf.function``."""
    towers = tw_core.towers(CPUS[:num_towers])
    models = {kind: Model(kind, towers[0]) for kind in KINDS}
    optimizers = {
        kind: optimizers_of(kind, make_optimizer, towers[:1], [model])[0]
        for kind, model in models.items()
    }

    @tf.function(autograph=False, input_signature=signature(num_towers))
    def step(given: dict[str, Any]) -> None:
        for kind, model in models.items():
            pairs = tw_core.map_towers(
                lambda tower, x, own=model.parts: list(
                    zip(gradients(own, x), own, strict=True)
                ),
                towers,
                given[kind],
            )
            tw_builders.apply_shared_gradients(pairs, optimizers[kind], average=average)

    take_steps(step, num_towers)
    return {kind: [[v.numpy() for v in m.parts]] for kind, m in models.items()}


def optimizers_of(
    kind: str,
    make_optimizer: MakeOptimizer,
    towers: Sequence[tw_core.Tower],
    models: Sequence[Model],
) -> list[Any]:
    """An optimizer a tower, which is called for in their order."""
    left = iter(models)
    return tw_builders.make_optimizers(
        towers,
        lambda: make_optimizer(DECAY.get(kind, 0.0), next(left).parts),
        models,
    )


def signature(num_towers: int) -> list[Any]:
    return [{kind: specs(kind, num_towers) for kind in KINDS}]


def take_steps(step: Callable[..., None], num_towers: int) -> None:
    for number in range(STEPS):
        given = {kind: inputs(kind, num_towers, number) for kind in KINDS}
        step(tf.nest.map_structure(tf.constant, given))
