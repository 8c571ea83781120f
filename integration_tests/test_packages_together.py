"""tw-ampopt inside builders, and tw-rlload with tw-ampopt and every reducer.

All train a softmax regression on handwritten digits, and must end where they do
with TensorFlow's own optimizer.
"""

from functools import cache

import numpy as np
import pytest
import tensorflow as tf
from conformance.rows import reducers
from digits_towers import (
    PROGRAMS,
    Weights,
    accuracy,
    batch,
    cross_entropy,
    digits,
    get_weights,
)

import tw_ampopt
import tw_core
import tw_reduce
import tw_rlload
from tw_core.testing import CPUS

v1 = tf.compat.v1
STEPS, TOWERS, EPOCHS, ROWS = 30, 2, 3, 32
ADAM = {"tf_optimizer": v1.train.AdamOptimizer, "learning_rate": 0.05}
each_mode = pytest.mark.parametrize("mode", PROGRAMS)
each_place = pytest.mark.parametrize(
    "is_replicated", [True, False], ids=["replicated", "parameter server"]
)


def plain(variables):
    return v1.train.AdamOptimizer(0.05)


def ampopt(mode, **options):
    options = {**ADAM, "loss_scale": tw_ampopt.DoublingScale(), **options}
    if mode == "session":
        return lambda variables: tw_ampopt.Optimizer(**options)
    return lambda variables: tw_ampopt.TowerOptimizer(variables, **options)


def train(program, steps):
    for step in range(steps):
        program.step(*batch(step))
    return program.read(program.variables)


@each_mode
@each_place
def test_ampopt_in_a_builder_ends_where_the_optimizer_that_it_wraps_does(
    mode, is_replicated
):
    make = PROGRAMS[mode]
    wanted = train(make(is_replicated, plain), STEPS)
    got = train(make(is_replicated, ampopt(mode)), STEPS)
    assert len(got) == (TOWERS if is_replicated else 1)
    for copy in got:
        for value, same, want in zip(copy, got[0], wanted[0], strict=True):
            np.testing.assert_array_equal(value, same)
            np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-5)
    assert accuracy(*got[0]) >= 0.9


def memory(program):
    """Variables, and what the wrapped optimizer keeps of each."""
    return [
        [*variables, *(optimizer.get_slot(v, slot) for v in variables for slot in "mv")]
        for variables, optimizer in zip(
            program.variables, program.optimizers, strict=True
        )
    ]


@each_mode
@each_place
def test_one_towers_infinity_makes_all_skip_and_slots_keep_their_bits(
    mode, is_replicated
):
    program = PROGRAMS[mode](is_replicated, ampopt(mode))
    train(program, 3)
    kept = memory(program)
    before = program.read(kept)
    images, labels = batch(3)
    bad = images.copy()
    bad[-1, 0] = np.inf  # a row of the last tower
    program.step(bad, labels)
    tf.nest.map_structure(np.testing.assert_array_equal, program.read(kept), before)
    told = [program.read(own.statistics()) for own in program.optimizers]
    assert [(s["updates"], s["skipped_updates"]) for s in told] == [(3, 1)] * len(told)
    assert {s["loss_scaling_log2"] for s in told} == {14.0}  # from 15
    program.step(images, labels)
    after = program.read(kept)
    assert all(
        not np.array_equal(value, old)
        for copy, olds in zip(after, before, strict=True)
        for value, old in zip(copy, olds, strict=True)
    )
    tf.nest.map_structure(np.testing.assert_array_equal, after, [after[0]] * len(after))


REDUCERS = reducers(tw_reduce.CollectiveKeys())


class Policy:
    """What ``build_graph`` of tw-rlload returns."""

    def __init__(self, inputs):
        self.loss = cross_entropy(get_weights(), *inputs)

    def gradients(self, optimizer):
        return optimizer.compute_gradients(self.loss)


def learnt_in_a_session(make_optimizer, **options):
    """Loads the digits onto two towers, and trains whole epochs in one call."""
    with (
        tf.Graph().as_default(),
        v1.Session(config=tw_core.session_config()) as session,
    ):
        columns = [v1.placeholder(tf.float32, [None, 64], "images")]
        columns.append(v1.placeholder(tf.int64, [None], "labels"))
        devices = CPUS[:TOWERS]
        trainer = tw_rlload.LocalSyncParallelOptimizer(
            make_optimizer(None), devices, columns, [], ROWS, Policy, **options
        )
        init = [v1.global_variables_initializer(), v1.local_variables_initializer()]
        session.run(init)
        trainer.load_data(session, [*digits()[0]], [])
        trainer.optimize(session, 0)
        trainer.run_epochs(session, EPOCHS, "rows", seed=0)
        with v1.variable_scope("", reuse=True):
            return [session.run(get_weights())]


def learnt_in_a_function(make_optimizer, **options):
    """The same with a ``DeviceBatch`` and a model a tower."""
    towers = tw_core.towers(CPUS[:TOWERS])
    specs = {
        "images": tf.TensorSpec([None, 64]),
        "labels": tf.TensorSpec([None], tf.int64),
    }
    rows = tw_rlload.DeviceBatch(towers, specs, max_per_device_batch_size=ROWS // 2)
    models = tw_core.replicate(towers, Weights)
    optimizers = [make_optimizer(model.trainable_variables) for model in models]
    train = tw_rlload.EpochFunction(
        rows,
        lambda own, x: cross_entropy(own.both, x["images"], x["labels"]),
        models,
        optimizers,
        **options,
    )
    rows.load([*digits()[0]])
    train.optimize(0)
    train.run_epochs(EPOCHS, "rows", seed=0)
    return [[v.numpy() for v in model.both] for model in models]


LEARN = {"session": learnt_in_a_session, "function": learnt_in_a_function}


@cache
def learnt_plainly(mode):
    return LEARN[mode](plain)[0]


@each_mode
@pytest.mark.parametrize("name", REDUCERS)
def test_rlload_with_ampopt_and_each_reducer_ends_where_the_plain_optimizer_does(
    mode, name
):
    reducer = tw_reduce.mean(REDUCERS[name](TOWERS))
    got = LEARN[mode](ampopt(mode), reducer=reducer)
    # Rounded on the wire, gradients differ in their third digit.
    tolerance = 0.1 if "bfloat16" in name else 1e-3
    for copy in got:
        for value, same, want in zip(copy, got[0], learnt_plainly(mode), strict=True):
            np.testing.assert_array_equal(value, same)
            np.testing.assert_allclose(value, want, atol=tolerance)
    assert accuracy(*got[0]) >= 0.9
