"""Steps that several threads call at the same time."""

import functools
import threading

import numpy as np
import pytest
import tensorflow as tf

from tw_ampopt import Optimizer, TowerOptimizer
from tw_core.testing import CPUS

v1 = tf.compat.v1
THREADS, CALLS, MICRO_BATCHES = 4, 100, 4
SHAPES = [(10,), (3,), (129, 130)]  # two in one buffer, one alone
SGD = {"learning_rate": 1.0}
IN_GRAPH = {**SGD, "minibatch_multiplier": MICRO_BATCHES}
WAIT_S = 120.0


def call_from_threads(step, *, threads=THREADS, calls=CALLS):
    """Calls a step from threads, and raises what one of them has raised."""
    raised = []

    def run():
        try:
            for _ in range(calls):
                step()
        except Exception as error:
            raised.append(error)

    running = [threading.Thread(target=run, daemon=True) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a thread waits forever"
    if raised:
        raise raised[0]


def make_variables(num_towers):
    lists = []
    for k in range(num_towers):
        with tf.device(CPUS[k]):
            lists.append([tf.Variable(tf.zeros(shape)) for shape in SHAPES])
    return lists


def check(values, updates):
    assert updates == THREADS * CALLS // MICRO_BATCHES
    for value in values:
        np.testing.assert_array_equal(value, np.full(value.shape, -updates))


@pytest.mark.parametrize("how", ["eager", "function", "compiled"])
@pytest.mark.parametrize("num_towers", [1, 2])
@pytest.mark.parametrize(
    "kind", ["tf.train.GradientDescentOptimizer", "keras.optimizers.SGD"]
)
def test_threads_that_call_one_accumulating_step_lose_no_gradient(
    how, num_towers, kind
):
    if (how, num_towers) == ("compiled", 2):
        pytest.skip("XLA compiles a step of one tower")
    lists = make_variables(num_towers)
    optimizer = TowerOptimizer(
        lists, tf_optimizer=kind, accumulation_steps=MICRO_BATCHES, **SGD
    )
    grads = [[tf.ones(shape) for shape in SHAPES]] * num_towers
    step = functools.partial(optimizer.apply, grads)
    if how != "eager":
        step = tf.function(step, jit_compile=how == "compiled")
        step.get_concrete_function()
    call_from_threads(step)
    for tower in lists:
        check([v.numpy() for v in tower], optimizer.statistics()["updates"].numpy())


@pytest.mark.parametrize(
    ("policy", "num_ops"),
    [("skip_group", 1), ("drop_micro_batch", 1), ("skip_group", 2)],
)
@pytest.mark.parametrize(
    "kind", ["tf.train.GradientDescentOptimizer", "keras.optimizers.SGD"]
)
def test_threads_that_run_accumulating_ops_lose_no_gradient(kind, policy, num_ops):
    """Two ops of one optimizer, as of asynchronous towers, share what they change."""
    with tf.Graph().as_default(), v1.Session() as sess:
        [variables] = make_variables(1)
        optimizer = Optimizer(tf_optimizer=kind, on_nonfinite=policy, **IN_GRAPH)
        pairs = [(tf.ones(v.shape), v) for v in variables]
        ops = [optimizer.apply_gradients(pairs) for _ in range(num_ops)]
        read = optimizer.statistics()
        sess.run(v1.global_variables_initializer())
        call_from_threads(sess.make_callable(ops), calls=CALLS // num_ops)
        check(sess.run(variables), sess.run(read)["updates"])


@pytest.mark.parametrize("how", ["eager", "function"])
def test_a_step_that_fails_lets_the_next_one_in(how):
    steps, w = tf.Variable(0), tf.Variable([1.0, 1.0])
    optimizer = TowerOptimizer(
        [w],
        tf_optimizer="tf.train.GradientDescentOptimizer",
        learning_rate=1.0,
        accumulation_steps=steps,
    )

    def step():
        return optimizer.apply([tf.ones(2)])

    step = tf.function(step) if how == "function" else step
    with pytest.raises(tf.errors.InvalidArgumentError) as kept:
        step()
    steps.assign(1)
    call_from_threads(step, threads=1, calls=1)
    np.testing.assert_array_equal(w, [0, 0])
    assert kept.traceback, "what was raised is still there, with all its frames"


def test_an_exported_step_accumulates(tmp_path):
    module = tf.Module()
    module.w = tf.Variable([1.0, 1.0])
    module.optimizer = TowerOptimizer(
        [module.w],
        tf_optimizer="tf.train.GradientDescentOptimizer",
        learning_rate=1.0,
        accumulation_steps=2,
    )
    module.step = tf.function(
        lambda grad: module.optimizer.apply([grad]),
        input_signature=[tf.TensorSpec([2])],
    )
    tf.saved_model.save(module, tmp_path)
    loaded = tf.saved_model.load(tmp_path)
    assert [bool(loaded.step(tf.ones(2))) for _ in range(4)] == [False, True] * 2
    np.testing.assert_array_equal(loaded.w, [-1, -1])
    np.testing.assert_array_equal(module.w, [1, 1])
