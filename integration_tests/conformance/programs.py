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
from conformance.models import (
    DECAY,
    FLAT_BELOW,
    KINDS,
    STEPS,
    flat_group,
    gradients,
    inputs,
    specs,
    start,
)
from tw_core.flat_variables import FlatModel, flatten
from tw_core.testing import CPUS

v1 = tf.compat.v1

# kind -> [copies][N], or why XLA does not compile it
Copies = dict[str, list[list[np.ndarray]] | ValueError]
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
        self.parts = [
            tf.Variable(start(part, tower.index), name=f"{kind}/v{n}")
            for n, part in enumerate(KINDS[kind])
        ]


AnyModel = Model | FlatModel[Model]


def make_model(kind: str, is_flat: bool, tower: tw_core.Tower) -> AnyModel:
    """Makes the model of a kind, its small variables in a flat one if ``is_flat``."""
    make = partial(Model, kind, tower)
    return (
        flatten(make, below_bytes=FLAT_BELOW, group=flat_group) if is_flat else make()
    )


def model_gradients(model: AnyModel, given: list[Any]) -> list[Any]:
    """The gradients by ``model.trainable_variables``."""
    if isinstance(model, Model):
        return gradients(model.parts, given)
    with model.reading():
        return gradients(model.model.parts, given, model.trainable_variables)


def values(model: AnyModel) -> list[np.ndarray]:
    """The [N] values of a model's own variables."""
    plain = model if isinstance(model, Model) else model.model
    return [part.numpy() for part in plain.parts]


def in_function(
    way: str,
    adds: Any,
    make_optimizer: MakeOptimizer,
    num_towers: int,
    *,
    is_flat: bool = False,
    trace: str = "each",
    jit_compile: bool = False,
) -> Copies:
    """Trains the models of all kinds in one ``tf.function``.

    ``way`` is replicated, sharded (each variable has an owner) or shared; ``adds``
    makes the reducer of replicated models, or says of the others whether to average.
    XLA compiles gradients and updates where ``jit_compile`` asks for it.
    """
    towers = tw_core.towers(CPUS[:num_towers])
    owners = towers[:1] if way == "shared" else towers
    models = {
        kind: tw_core.replicate(owners, partial(make_model, kind, is_flat))
        for kind in KINDS
    }
    optimizers = {}
    for kind, own in models.items():
        make = partial(make_optimizer, DECAY.get(kind, 0.0))
        if way == "sharded":
            owned = tw_builders.owned_variables(towers, own)
            made = tw_builders.make_sharded_optimizer(towers, partial(make, owned), own)
            optimizers[kind] = [made[0]]
        else:  # called for in the order of towers
            each = map(make, [model.trainable_variables for model in own])
            optimizers[kind] = tw_builders.make_optimizers(
                owners, partial(next, each), own
            )
    reduce = adds(num_towers) if way == "replicated" else None
    spec = {kind: specs(kind, num_towers) for kind in KINDS}
    refused: dict[str, ValueError] = {}

    def train(kind: str, own: list[AnyModel], given: list[list[Any]]) -> None:
        # Where sizes are unknown, there is a placeholder, which XLA does not compile.
        has_unknown = any(part.unknown for part in KINDS[kind])
        grads = tw_core.map_towers(
            lambda tower, model, x: model_gradients(model, x),
            towers,
            own * (num_towers // len(own)),
            given,
            trace=trace,
            jit_compile=jit_compile and not has_unknown,
        )
        jit = {"jit_compile": jit_compile}
        if way == "replicated":
            args = (towers, reduce(grads), own, optimizers[kind])
            tw_builders.apply_gradients(*args, **jit)
        elif way == "sharded":
            args = (towers, grads, own, *optimizers[kind])
            tw_builders.apply_sharded_gradients(*args, average=adds, **jit)
        else:
            variables = own[0].trainable_variables
            pairs = [list(zip(g, variables, strict=True)) for g in grads]
            tw_builders.apply_shared_gradients(
                pairs, *optimizers[kind], average=adds, **jit
            )

    @tf.function(autograph=False, input_signature=[spec])
    def step(given: dict[str, Any]) -> None:
        for kind, own in models.items():
            try:
                train(kind, own, given[kind])
            except ValueError as error:
                if not jit_compile:
                    raise
                refused[kind] = error

    for number in range(STEPS):
        inputs_of_step = {kind: inputs(kind, num_towers, number) for kind in KINDS}
        step(tf.nest.map_structure(tf.constant, inputs_of_step))
    trained = {kind: [values(model) for model in own] for kind, own in models.items()}
    return trained | refused
