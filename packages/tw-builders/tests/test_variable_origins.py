"""The sync op goes by who made a variable, whatever the model's scopes are called."""

import logging
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from session_builders import build, initialise, new_session, pairs_of

from tw_builders import SyncMultiGPUReplicatedBuilder, apply_gradients, make_optimizers
from tw_core import Replicated, map_towers, split_grad_list, towers
from tw_core.testing import CPUS

v1 = tf.compat.v1
SCOPES = ["tower0", "tower1", "tower2", "a"]
OPTIMIZERS = {
    "momentum": partial(v1.train.MomentumOptimizer, 0.1, 0.9),
    "adam": partial(v1.train.AdamOptimizer, 0.1),
    "ftrl": partial(v1.train.FtrlOptimizer, 0.1),
}


def gradients(variables):
    return pairs_of(tf.add_n([tf.reduce_sum(v**2) for v in variables]), variables)


def model():
    """Small and large variables in scopes that are called as towers are."""
    made = []
    for scope in SCOPES:
        with v1.variable_scope(scope):
            made.append(v1.get_variable("w", [2]))
            v1.get_variable("mean", [3], trainable=False)
    made.append(v1.get_variable("large", [17_000]))
    return made


def build_replicated(num_towers, optimizer, tower_fn=None):
    builder = SyncMultiGPUReplicatedBuilder(list(CPUS[:num_towers]), True, "cpu")
    tower_fn = tower_fn or (lambda: gradients(model()))
    return build(builder, tower_fn, OPTIMIZERS[optimizer])


def number_all(session, variables):
    """Gives every variable values of its own."""
    for number, variable in enumerate(variables):
        variable.load(np.full(variable.shape, number + 1.0, np.float32), session)
    return {v.name: session.run(v) for v in variables}


def expect_copies(session, sync, originals, copies):
    """Checks that ``sync`` leaves originals alone and copies each to its copies."""
    want = number_all(session, [*originals, *copies])
    session.run(sync)
    for original in originals:
        np.testing.assert_array_equal(session.run(original), want[original.name])
    for copy in copies:
        original = copy.name.partition("/")[2]
        np.testing.assert_array_equal(session.run(copy), want[original], copy.name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_towers", [2, 3])
def test_a_model_with_scopes_called_as_towers_keeps_its_weights(num_towers, optimizer):
    with tf.Graph().as_default(), new_session() as session:
        _, _, sync = build_replicated(num_towers, optimizer)
        originals, copies = v1.global_variables(), v1.local_variables()
        assert len(copies) == (num_towers - 1) * len(originals)
        initialise(session)
        expect_copies(session, sync, originals, copies)


def test_a_policys_scopes_and_functions_on_towers_are_told_apart_as_well():
    ours = towers(list(CPUS[:2]))

    def tower_pairs(tower):
        with Replicated().scope(tower):
            return gradients(model())

    with tf.Graph().as_default(), new_session() as session:
        with v1.variable_scope("outer"):
            grads, variables = split_grad_list(map_towers(tower_pairs, ours))
        for tower, own in zip(ours, variables, strict=True):
            assert Replicated().trainable_variables(tower) == own
        optimizers = make_optimizers(ours, OPTIMIZERS["momentum"])
        apply_gradients(ours, grads, variables, optimizers)
        sync = SyncMultiGPUReplicatedBuilder.get_post_init_ops()
        initialise(session)
        everything = [*v1.global_variables(), *v1.local_variables()]
        before = number_all(session, everything)
        session.run(sync)
        for original, copy in zip(*variables, strict=True):
            for suffix in ("", "/Momentum"):
                want = before[f"{original.op.name}{suffix}:0"]
                [got] = [v for v in everything if v.name == f"{copy.op.name}{suffix}:0"]
                np.testing.assert_array_equal(session.run(got), want)


def test_an_imported_graph_goes_by_the_names_of_local_variables(caplog, tmp_path):
    with tf.Graph().as_default(), caplog.at_level(logging.WARNING):
        build_replicated(2, "adam")
        v1.train.export_meta_graph(str(tmp_path / "graph.meta"))
    assert "serializ" not in caplog.text
    with tf.Graph().as_default(), new_session() as session:
        v1.train.import_meta_graph(str(tmp_path / "graph.meta"))
        with caplog.at_level(logging.WARNING, "tw_builders"):
            sync = SyncMultiGPUReplicatedBuilder.get_post_init_ops()
        assert "has no record of which tower made a variable" in caplog.text
        assert "'tower1/tower1/w': 'tower1/w'" in caplog.text
        initialise(session)
        expect_copies(session, sync, v1.global_variables(), v1.local_variables())
        own = Replicated().trainable_variables(towers(list(CPUS[:2]))[1])
        assert own == v1.trainable_variables()[len(own) :]
        assert all(v.name.startswith("tower1/") for v in own)
