"""Epochs whose gradients a function of the user's applies, for all towers at once."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from tw_core.testing import CPUS
from tw_rlload import LocalSyncParallelOptimizer, weighted_mean

v1 = tf.compat.v1
COLUMNS = {"x": (np.float32, (4,))}
# Padded to 24 by two towers or three. Whole numbers, as all that is computed of them
# in powers of two is exact.
X = np.random.default_rng(0).integers(-2, 3, (22, 4)).astype(np.float32)
START = {
    "a": np.float32([1, 0, 2, 0]),
    "b": np.float32(1),
    "idle": np.float32([5, 5]),
}


def loss_fn(variables, inputs, weights):
    errors = tf.linalg.matvec(inputs["x"], variables["a"]) + variables["b"]
    return weighted_mean(tf.square(errors), weights)


def apply_in_turn(grads_seen, made, grads, variables, optimizer):
    """Applies variable n by tower n % K, and gives the others its value."""
    grads_seen.append(grads)
    owner_of = [n % len(made) for n in range(len(variables[0]))]
    pairs = [
        (grads[k][n], variables[k][n])
        for n, k in enumerate(owner_of)
        if grads[k][n] is not None
    ]
    applied = optimizer.apply_gradients(pairs)
    copies = []
    with tf.control_dependencies([] if applied is None else [applied]):
        for n, k in enumerate(owner_of):
            value = variables[k][n].read_value()
            copies += [own[n].assign(value, read_value=False) for own in variables]
    return tf.group(*copies)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 1.0], ids=["", "clipped"])
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize(
    "opt",
    [
        partial(v1.train.GradientDescentOptimizer, 2**-6),
        partial(v1.train.MomentumOptimizer, 2**-6, 0.5),
    ],
    ids=["descent", "momentum"],
)
def test_padded_epochs_are_those_of_towers_that_all_apply(
    make_trainer, opt, devices, clip
):
    def trained(**more):
        trainer = make_trainer(
            loss_fn,
            START,
            COLUMNS,
            devices=devices,
            opt=opt,
            remainder="pad",
            grad_norm_clipping=clip,
            **more,
        )
        trainer.load([X])
        losses = trainer.run_epochs(2, "rows", seed=0).losses
        trainer.optimize(0)
        return trainer.weights(), losses

    seen = []
    got, losses = trained(apply_fn=partial(apply_in_turn, seen))
    want, other_losses = trained()
    np.testing.assert_array_equal(losses, other_losses)
    assert not np.array_equal(got["a"], START["a"])
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)
    for grads in seen:
        assert [[g is None for g in own] for own in grads] == [
            [False, False, True]
        ] * devices


# In a session graph.


class Policy:
    """``gradients`` leaves it to the optimizer to find the variables."""

    def __init__(self, inputs):
        made = {n: v1.get_variable(n, initializer=v) for n, v in START.items()}
        self.loss = loss_fn(made, {"x": inputs[0]}, tf.ones(tf.shape(inputs[0])[:1]))

    def gradients(self, optimizer):
        return optimizer.compute_gradients(self.loss)


def in_session_graph(build_graph=Policy, apply_fn=None):
    return LocalSyncParallelOptimizer(
        v1.train.MomentumOptimizer(0.1, 0.5),
        CPUS[:2],
        [v1.placeholder(tf.float32, [None, 4], "x")],
        [],
        4,
        build_graph,
        apply_fn=apply_fn or partial(apply_in_turn, []),
    )


def test_the_other_towers_have_local_variables_below_their_names(graph):
    in_session_graph()
    local = {v.op.name: v.device for v in v1.local_variables() if "Mom" not in v.name}
    assert local == {f"tower1/{name}": "/device:CPU:1" for name in START}
    assert {v.op.name for v in v1.global_variables()} >= set(START)


def test_variables_that_towers_share_or_make_anew_are_refused(graph):
    shared = v1.get_variable("shared", [4])

    def sharing(inputs):
        policy = Policy(inputs)
        policy.loss += tf.reduce_mean(inputs[0] * shared)
        return policy

    def new_each_time(inputs):
        policy = Policy(inputs)
        policy.loss += tf.reduce_sum(tf.Variable(tf.ones([4]), name="new"))
        return policy

    message = r"shared:0 is one variable in towers \[0, 1\], and would be updated once"
    with pytest.raises(ValueError, match=message):
        in_session_graph(sharing)
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match=r"got new ones: \['tower0.*/new:0'\]"),
    ):
        in_session_graph(new_each_time)


def test_a_function_that_returns_no_op_is_refused(graph):
    with pytest.raises(TypeError, match=r"apply_fn must return the op .*; got None"):
        in_session_graph(apply_fn=lambda *given: None)
