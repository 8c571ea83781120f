"""Sharded training: where sums, updates and slots are, and what waits for what."""

import warnings
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from session_builders import build, new_session, pairs_of

from tw_builders import (
    SyncMultiGPUShardedBuilder,
    apply_at_owners,
    apply_sharded_gradients,
    make_sharded_optimizer,
    owned_variables,
)
from tw_core import get_current_tower_context, map_towers, replicate, towers
from tw_core.devices import canonical_device
from tw_core.flat_variables import flatten
from tw_core.internal import tf_variable
from tw_core.testing import CPUS
from tw_core.variables import copy_to_replicas

v1 = tf.compat.v1
SIZES = {"a": 40, "b": 30, "c": 20, "d": 10}  # owned by towers 0, 1, 1, 0 of two
LEGACY = tf_keras.optimizers.legacy


def tower_pairs():
    k = get_current_tower_context().index
    variables = [v1.get_variable(n, [s], tf.float32) for n, s in SIZES.items()]
    loss = tf.add_n([tf.reduce_sum((v - k) ** 2) for v in variables])
    return pairs_of(loss, variables)


def built(get_opt_fn, num_towers=2):
    builder = SyncMultiGPUShardedBuilder(list(CPUS[:num_towers]), True)
    grads, train_op, _ = build(builder, tower_pairs, get_opt_fn)
    return builder, train_op, [[v for _, v in own] for own in grads]


def names_of(collection):
    return {v.name.split(":")[0] for v in v1.get_collection(collection)}


@pytest.mark.parametrize(
    ("get_opt_fn", "slots", "others"),
    [
        (partial(v1.train.MomentumOptimizer, 0.1, 0.9), ["{}/Momentum"], []),
        (
            partial(v1.train.AdamOptimizer, 0.1),
            ["{}/Adam", "{}/Adam_1"],
            ["beta1_power", "beta2_power"],
        ),
        (partial(v1.train.AdagradOptimizer, 0.1), ["{}/Adagrad"], []),
        (partial(LEGACY.SGD, 0.1, momentum=0.9), ["SGD/{}/momentum"], None),
    ],
    ids=["momentum", "Adam", "Adagrad", "legacy momentum"],
)
def test_slots_exist_once_with_their_owners_under_tower_0s_names(
    get_opt_fn, slots, others
):
    with tf.Graph().as_default():
        builder, *_ = built(get_opt_fn)
        made = {v.name.split(":")[0]: v for v in v1.global_variables()}
        assert names_of("local_variables") == {f"tower1/{name}" for name in SIZES}
        wanted = {slot.format(name) for name in SIZES for slot in slots}
        state = set(made) - set(SIZES)
        assert wanted <= state
        if others is not None:
            assert state - wanted == set(others)
        owners = [v.device for _, v in builder.grads]
        assert owners == [f"/device:CPU:{owner}" for owner in (0, 1, 1, 0)]
        assert [canonical_device(grad.device) for grad, _ in builder.grads] == owners
        for name, home in zip(SIZES, owners, strict=True):
            for slot in slots:
                assert canonical_device(made[slot.format(name)].device) == home


def ancestors(op):
    found, left = set(), [op]
    while left:
        new = left.pop()
        if new not in found:
            found.add(new)
            left += [*new.control_inputs, *(tensor.op for tensor in new.inputs)]
    return found


@pytest.mark.parametrize(
    "get_opt_fn",
    [partial(v1.train.AdamOptimizer, 0.1), partial(LEGACY.Adam, 0.1)],
)
def test_a_copy_waits_for_no_other_variables_update(get_opt_fn):
    with tf.Graph().as_default():
        _, train_op, variables = built(get_opt_fn)
        handles = {v.handle: v.name for own in variables for v in own}
        copies = [
            op
            for op in ancestors(train_op)
            if op.name.startswith("copy_from_owners/") and op.type == "AssignVariableOp"
        ]
        assert len(copies) == len(SIZES)
        for copy in copies:
            name = handles[copy.inputs[0]].removeprefix("tower1/")
            used = {
                handles[tensor].removeprefix("tower1/")
                for op in ancestors(copy)
                for tensor in op.inputs
                if tensor in handles and "Apply" in op.type
            }
            assert used == {name}


def test_sums_of_large_variables_wait_for_no_other_sum():
    with tf.Graph().as_default():

        def pairs():
            variables = [v1.get_variable(f"w{n}", [8_192]) for n in range(4)]
            return pairs_of(
                tf.add_n([tf.reduce_sum(v**2) for v in variables]), variables
            )

        builder = SyncMultiGPUShardedBuilder(list(CPUS[:2]), True)
        _, train_op, _ = build(builder, pairs, partial(v1.train.AdamOptimizer, 0.1))
        sums = [op for op in ancestors(train_op) if op.type == "AddN"]
        assert len(sums) == 4
        for op in sums:
            assert [other.type for other in ancestors(op)].count("AddN") == 1


@pytest.mark.parametrize(
    "get_opt_fn",
    [partial(v1.train.AdamOptimizer, 0.1), partial(keras.optimizers.Adam, 0.1)],
    ids=["v1", "Keras 3"],
)
def test_in_a_function_a_copy_of_a_large_variable_waits_for_no_other(get_opt_fn):
    ours, models = make_models(times=1_000)
    step, *_ = function_step(ours, models, get_opt_fn)
    graph = step.get_concrete_function(tf.ones([2])).graph
    variables = [v for model in models for v in model.parts]
    handles = {graph.capture(v.handle).op: v.name for v in variables}
    plain = [
        op
        for op in graph.get_operations()
        if op.type == "AssignVariableOp" and op.inputs[0].op in handles
    ]
    assert len(plain) >= len(SIZES)
    for assign in plain:
        updated = {
            handles[op.inputs[0].op]
            for op in ancestors(assign)
            if op.type.startswith(("Assign", "ResourceApply"))
            and op.inputs[0].op in handles
        }
        assert len(updated) == 1


class Gated(v1.train.GradientDescentOptimizer):
    """Updates in a branch, as a gate does."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        pairs = list(grads_and_vars)
        apply = super().apply_gradients

        def update():
            with tf.control_dependencies([apply(pairs)]):
                return tf.constant(True)

        return tf.cond(pairs[0][0][0] < 1e9, update, lambda: tf.constant(False)).op


@pytest.fixture(params=["2", "1"])
def control_flow(request):
    if request.param == "1":
        v1.disable_control_flow_v2()
    yield
    v1.enable_control_flow_v2()


@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize("kind", [v1.train.GradientDescentOptimizer, Gated])
def test_a_copy_waits_for_its_own_update(kind):
    with tf.Graph().as_default():
        _, train_op, variables = built(partial(kind, 0.25), num_towers=4)
        with new_session() as running:
            for _ in range(25):
                running.run(train_op)
                first, *others = running.run(variables)
                for other in others:
                    for got, want in zip(other, first, strict=True):
                        np.testing.assert_array_equal(got, want)


# Optimizers that need all gradients at once.


class Clipped(v1.train.MomentumOptimizer):
    """As users write it: the norm is that of what the optimizer is given."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        grads, variables = zip(*grads_and_vars, strict=True)
        clipped, _ = tf.clip_by_global_norm(grads, 0.5)
        return super().apply_gradients(
            zip(clipped, variables, strict=True), global_step, name
        )


class Model(tf.Module):
    def __init__(self, times=1):
        super().__init__()
        self.parts = [
            tf.Variable(np.linspace(-1, 1, times * size, dtype="f"), name=name)
            for name, size in SIZES.items()
        ]


def make_models(num_towers=2, times=1):
    ours = towers(list(CPUS[:num_towers]))
    return ours, replicate(ours, lambda tower: Model(times))


def function_step(ours, models, get_opt_fn):
    optimizer, saved = make_sharded_optimizer(ours, get_opt_fn, models)

    @tf.function(autograph=False)
    def step(scales):
        grads = map_towers(
            lambda tower, model: [scales[tower.index] * (v - 0.5) for v in model.parts],
            ours,
            models,
        )
        apply_sharded_gradients(ours, grads, models, optimizer)

    return step, optimizer, saved


@pytest.mark.parametrize(
    "get_opt_fn",
    [
        partial(keras.optimizers.SGD, 0.1, momentum=0.9, global_clipnorm=0.5),
        partial(keras.optimizers.Adam, 0.1, global_clipnorm=0.5),
        partial(LEGACY.SGD, 0.1, momentum=0.9, global_clipnorm=0.5),
        partial(Clipped, 0.1, 0.9),
    ],
    ids=["Keras 3", "Keras 3 Adam", "legacy", "one's own class"],
)
@pytest.mark.parametrize("num_towers", [1, 2, 4])
def test_a_global_norm_is_that_of_all_shards(get_opt_fn, num_towers):
    ours, models = make_models(num_towers)
    step, *_ = function_step(ours, models, get_opt_fn)
    alone, optimizer = Model(), get_opt_fn()
    for scale in (1.0, 0.01, 3.0):
        step(tf.constant([scale] * num_towers))
        grads = [scale * (v - 0.5) for v in alone.parts]
        optimizer.apply_gradients(zip(grads, alone.parts, strict=True))
    for model in models:
        for got, want in zip(model.parts, alone.parts, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


# Gradients that are reduced already.


def reduced_step(ours, models, get_opt_fn, num_steps=3):
    """Steps with the towers' means by ``apply_at_owners``; returns the optimizer."""
    optimizer, _ = make_sharded_optimizer(ours, get_opt_fn, models)

    @tf.function(autograph=False)
    def step():
        grads = [
            [None if v is model.parts[2] else v - 0.5 for v in model.parts]
            for model in models
        ]
        apply_at_owners(ours, grads, models, optimizer)

    for _ in range(num_steps):
        step()
    return optimizer


@pytest.mark.parametrize(
    "get_opt_fn",
    [
        partial(keras.optimizers.SGD, 0.1, momentum=0.9, global_clipnorm=0.5),
        partial(v1.train.AdamOptimizer, 0.1),
        partial(LEGACY.SGD, 0.1, momentum=0.9, global_clipnorm=0.5),
    ],
    ids=["Keras 3", "v1", "legacy"],
)
@pytest.mark.parametrize("num_towers", [1, 2, 3])
def test_reduced_gradients_are_applied_once_and_copied(get_opt_fn, num_towers):
    ours, models = make_models(num_towers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Keras warns of gradients that are None
        applied = reduced_step(ours, models, get_opt_fn)
    if isinstance(applied, v1.train.AdamOptimizer):  # which variables have gradients
        assert len(applied.variables()) == 2 * len(SIZES) + 2  # changes no owner
    alone, optimizer = Model(), get_opt_fn()
    used = [v for n, v in enumerate(alone.parts) if n != 2]
    for _ in range(3):
        optimizer.apply_gradients([(v - 0.5, v) for v in used])
    for model in models:
        for got, want in zip(model.parts, alone.parts, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(model.parts[2], Model().parts[2])
    # Of gradients that differ, that of a variable's owner counts.
    before = [v.numpy() for v in models[0].parts]
    descent, _ = make_sharded_optimizer(
        ours, partial(v1.train.GradientDescentOptimizer, 1.0), models
    )
    grads = [[tf.fill(v.shape, 1.0 + k) for v in before] for k in range(num_towers)]
    apply_at_owners(ours, grads, models, descent)
    owners = [int(v.device[-1]) for v in owned_variables(ours, models)]
    for model in models:
        for got, owner, start in zip(model.parts, owners, before, strict=True):
            np.testing.assert_allclose(got, start - (1.0 + owner), rtol=1e-6)


def test_in_a_session_reduced_gradients_leave_the_state_of_the_builder():
    def built_by(apply):
        with tf.Graph().as_default():
            made = []

            def tower():
                made.append([v for _, v in tower_pairs()])
                return made[-1]

            builder = SyncMultiGPUShardedBuilder(list(CPUS[:2]), True)
            builder.call_for_each_tower(tower)
            grads = [[v - 1.0 for v in own] for own in made]
            op = apply(towers(CPUS[:2]), grads, made, v1.train.AdamOptimizer(0.1))
            names = names_of("variables"), names_of("local_variables")
            copy = copy_to_replicas(made)
            with new_session() as running:
                [running.run(v.assign(tf.fill(v.shape, 3.0))) for v in made[0]]
                running.run(copy)
                running.run(op)
                return names, running.run(made)

    got, want = built_by(apply_at_owners), built_by(apply_sharded_gradients)
    assert got[0] == want[0]
    tf.nest.map_structure(np.testing.assert_array_equal, got[1], want[1])


# What only the functions have.


def test_slots_made_early_are_on_their_owners_device():
    ours, models = make_models()
    homes = [f"/device:CPU:{owner}" for owner in (0, 1, 1, 0)]
    owners = owned_variables(ours, models)
    assert [canonical_device(v.device) for v in owners] == homes
    for get_opt_fn in (
        partial(keras.optimizers.Adam, 0.1),
        partial(v1.train.AdamOptimizer, 0.1),
        partial(LEGACY.Adam, 0.1),
        partial(tf_keras.optimizers.Adam, 0.1),
    ):
        optimizer, _ = make_sharded_optimizer(ours, get_opt_fn, models)
        variables = optimizer.variables
        variables = variables() if callable(variables) else variables
        plain = [tf_variable(v) for v in variables]
        for size, home in zip(SIZES.values(), homes, strict=True):
            slots = [v for v in plain if v.shape == [size]]
            assert [canonical_device(v.device) for v in slots] == [home] * 2


def test_functions_that_make_other_state_than_that_of_shards_are_refused():
    ours, models = make_models()
    rates = []

    def built_already():
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(models[0].parts)
        return optimizer

    def other_the_second_time():
        if not rates:
            rates.append(tf.Variable(0.1))
        return v1.train.MomentumOptimizer(rates[0], 0.9)

    for get_opt_fn, says in (
        (built_already, "Adam is already built"),
        (other_the_second_time, "get_opt_fn made different variables"),
    ):
        with pytest.raises(ValueError, match=says):
            make_sharded_optimizer(ours, get_opt_fn, models)


@pytest.mark.parametrize("apply", [apply_sharded_gradients, apply_at_owners])
@pytest.mark.parametrize(
    "get_opt_fn",
    [
        partial(v1.train.AdamOptimizer, 0.1),
        partial(keras.optimizers.Adam, 0.1),
        partial(tf_keras.optimizers.Adam, 0.1),
    ],
    ids=["v1", "Keras 3", "tf_keras"],
)
def test_the_optimizer_for_checkpoints_is_refused_for_training(get_opt_fn, apply):
    ours, models = make_models()
    optimizer, saved = make_sharded_optimizer(ours, get_opt_fn, models)
    grads = [[tf.ones(v.shape) for v in model.parts] for model in models]
    with pytest.raises(ValueError, match=r"^Adam.* has state for variables other"):
        tf.function(apply, autograph=False)(ours, grads, models, saved)
    np.testing.assert_array_equal(models[0].parts[0], Model().parts[0])
    apply(ours, grads, models, optimizer)


def test_an_optimizer_made_for_views_is_refused_for_their_flat_variables():
    ours = towers(list(CPUS[:2]))
    models = [flat.model for flat in replicate(ours, lambda tower: flatten(Model))]
    replicas = [model.parts for model in models]
    optimizer, _ = make_sharded_optimizer(
        ours, partial(keras.optimizers.Adam, 0.1), replicas
    )
    grads = [[tf.ones(v.shape) for v in own] for own in replicas]
    with pytest.raises(ValueError, match="flat models as flatten returned them"):
        apply_sharded_gradients(ours, grads, replicas, optimizer)


def test_variables_on_a_device_of_their_own_are_refused_before_anything_is_built():
    with tf.Graph().as_default() as graph:
        builder = SyncMultiGPUShardedBuilder(list(CPUS[:2]), True)

        def tower():
            with tf.device("/cpu:0"):
                w = v1.get_variable("w", [2])
            return [(tf.ones([2]), w)]

        grads = builder.call_for_each_tower(tower)
        before = len(graph.get_operations())
        with pytest.raises(
            ValueError, match=r"Every tower's.*tower1/w:0 of tower1 is on"
        ):
            builder.build(grads, partial(v1.train.AdamOptimizer, 0.1))
        assert len(graph.get_operations()) == before
