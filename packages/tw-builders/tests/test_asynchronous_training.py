"""Towers that apply their own gradients: in one op, and truly asynchronously.

Reaches into the runner's private parts to shorten its wait after Ctrl-C, and to see
when it waits.
"""

import signal
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from harness.processes import wait_until
from session_builders import new_session, pairs_of

from tw_builders import AsyncMultiGPUBuilder, AsyncRunner, TowerError, locked_step
from tw_core import DeadlineError, get_current_tower_context
from tw_core.testing import CPUS

v1 = tf.compat.v1
WAIT_S = 60
LINEAR = np.array([1.0, -2.0, 4.0], np.float32)
descend = partial(v1.train.GradientDescentOptimizer, 0.5)
adam = partial(v1.train.AdamOptimizer, 0.1)


def build(num_towers, *, scale_gradient=True, slow_tower=None, seconds=0.0):
    """Tower k's gradient is (k + 1) * LINEAR; one tower can be slow."""
    builder = AsyncMultiGPUBuilder(list(CPUS[:num_towers]), scale_gradient)

    def wait(x):
        time.sleep(seconds)
        return x

    def tower():
        k = get_current_tower_context().index
        w = v1.get_variable("w", initializer=np.zeros(3, np.float32))
        b = v1.get_variable("b", initializer=np.zeros(3, np.float32))
        slope = tf.constant((k + 1) * LINEAR)
        if k == slow_tower:
            slope = tf.numpy_function(wait, [slope], tf.float32, stateful=True)
            slope.set_shape([3])
        loss = tf.reduce_sum(slope * w) + tf.reduce_sum(slope * b)
        return pairs_of(loss, [w, b])

    return builder, builder.call_for_each_tower(tower)


@pytest.mark.parametrize("num_towers", [1, 2, 4])
@pytest.mark.parametrize("scale", [True, False])
def test_one_op_equals_the_towers_applies_after_each_other(num_towers, scale):
    with tf.Graph().as_default():
        builder, grads = build(num_towers, scale_gradient=scale)
        train_op = builder.build(grads, adam)
        with new_session() as session:
            for _ in range(5):
                session.run(train_op)
            got = session.run([v for _, v in grads[0]])
    divisor = num_towers if scale else 1
    with tf.Graph().as_default():
        w = v1.get_variable("w", initializer=np.zeros(3, np.float32))
        gradient = v1.placeholder(tf.float32, [3])
        one = adam().apply_gradients([(gradient, w)])
        with new_session() as session:
            for _ in range(5):
                for k in range(num_towers):
                    session.run(one, {gradient: (k + 1) * LINEAR / divisor})
            want = session.run(w)
    np.testing.assert_array_equal(got, [want, want])


@pytest.mark.parametrize(
    ("num_towers", "devices"),
    [
        (2, ["/device:CPU:0", "/device:CPU:1"]),
        (3, ["/device:CPU:0", "/device:CPU:1"]),
        (4, ["/device:CPU:0"] * 2),
    ],
)
def test_variables_live_on_the_cpu_from_four_towers_on(num_towers, devices):
    with tf.Graph().as_default():
        _, grads = build(num_towers)
        for tower in grads:
            assert [v.device for _, v in tower] == devices


@pytest.mark.parametrize("share_optimizer", [False, True])
def test_fast_towers_do_not_wait_for_a_slow_one(share_optimizer):
    with tf.Graph().as_default():
        builder, grads = build(3, slow_tower=1, seconds=0.2)
        ops = builder.build_tower_ops(grads, adam, share_optimizer=share_optimizer)
        with new_session() as session:
            steps = [session.make_callable(op) for op in ops]
            with AsyncRunner(steps) as runner:
                wait_until(lambda: runner.steps_done[1] >= 3)
            done = runner.steps_done
    assert min(done[0], done[2]) >= 5 * done[1], done


@pytest.mark.parametrize("share_optimizer", [False, True])
def test_no_tower_loses_an_update_of_optimizer_state(share_optimizer):
    decay = 0.999
    slow_decay = partial(v1.train.AdamOptimizer, 0.1, beta1=decay)
    with tf.Graph().as_default():
        builder, grads = build(4)
        ops = builder.build_tower_ops(
            grads, slow_decay, share_optimizer=share_optimizer
        )
        variables = v1.global_variables() + v1.local_variables()
        powers = [v for v in variables if "beta1_power" in v.name]
        with new_session() as session:
            steps = [session.make_callable(op) for op in ops]
            assert AsyncRunner(steps, max_steps=100).start().join(WAIT_S) == [100] * 4
            got = session.run(powers)
    exponents = [401] if share_optimizer else [101] * 4
    np.testing.assert_allclose(got, [decay**n for n in exponents], rtol=1e-4)


def test_scaled_sparse_gradients_stay_sparse():
    with tf.Graph().as_default():
        builder = AsyncMultiGPUBuilder(list(CPUS[:2]))

        def tower():
            table = v1.get_variable("table", initializer=np.zeros((5, 2), np.float32))
            return pairs_of(tf.reduce_sum(tf.gather(table, [1, 3, 1])), [table])

        grads = builder.call_for_each_tower(tower)
        train_op = builder.build(grads, descend)
        with new_session() as session:
            session.run(train_op)
            got = session.run(grads[0][0][1])
    want = np.zeros((5, 2), np.float32)
    want[[1, 3]] = [[-1.0], [-0.5]]
    np.testing.assert_array_equal(got, want)


def test_steps_with_a_lock_are_applied_one_at_a_time():
    inside, lock = [], threading.Lock()

    def apply(tower):
        inside.append(tower)
        time.sleep(0.001)
        assert inside == [tower]
        inside.clear()

    steps = [locked_step(partial(int, k), apply, lock) for k in range(3)]
    assert AsyncRunner(steps, max_steps=20).start().join(WAIT_S) == [20] * 3


def test_a_tower_that_raises_is_named_and_stops_the_others():
    def fails():
        raise ArithmeticError("no luck")

    runner = AsyncRunner([lambda: time.sleep(0.001), fails]).start()
    with pytest.raises(
        TowerError, match="1 towers failed: tower1: ArithmeticError: no"
    ):
        runner.join(WAIT_S)
    assert not runner.is_running
    with pytest.raises(TowerError) as caught:
        runner.join(WAIT_S)
    assert isinstance(caught.value.errors["tower1"], ArithmeticError)


def test_the_end_of_a_towers_data_is_no_error_and_an_error_of_the_body_stops_towers():
    items = iter(range(3))
    with tf.Graph().as_default():
        data = v1.data.make_one_shot_iterator(tf.data.Dataset.range(5)).get_next()
        with v1.Session() as session:
            steps = [lambda: next(items), session.make_callable(data)]
            assert AsyncRunner(steps).start().join(WAIT_S) == [3, 5]
    with (
        pytest.raises(KeyError),
        AsyncRunner([lambda: time.sleep(0.001)] * 2) as runner,
    ):
        raise KeyError("mine")
    assert not runner.is_running


def press_ctrl_c_in_join(runner):
    """Interrupts the main thread while it waits for a step of ``runner``."""
    main = threading.main_thread().ident

    def waits():
        frame = sys._current_frames()[main]
        while frame is not None and frame.f_code is not AsyncRunner._wait.__code__:
            frame = frame.f_back
        return frame is not None and runner.is_running

    def press():
        wait_until(waits)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    return thread


def test_ctrl_c_while_joining_stops_the_towers():
    runner = AsyncRunner([lambda: time.sleep(0.001)] * 2).start()
    presser = press_ctrl_c_in_join(runner)
    with pytest.raises(KeyboardInterrupt):
        runner.join(WAIT_S)
    presser.join(WAIT_S)
    assert not runner.is_running
    assert runner.join(WAIT_S) == runner.join(WAIT_S)


@pytest.mark.parametrize("timeout_s", [WAIT_S, None])
def test_ctrl_c_does_not_wait_for_a_tower_that_hangs(monkeypatch, timeout_s):
    monkeypatch.setattr("tw_builders._runner._SECONDS_AFTER_CTRL_C", 0.01)
    release = threading.Event()
    runner = AsyncRunner([lambda: release.wait(WAIT_S)]).start()
    presser = press_ctrl_c_in_join(runner)
    with pytest.raises(KeyboardInterrupt):
        runner.join(timeout_s)
    assert runner.is_running
    release.set()
    presser.join(WAIT_S)
    assert runner.join(None) == [1]


def test_towers_that_have_started_stop_where_a_thread_cannot_be_had(monkeypatch):
    start, started = threading.Thread.start, []

    def start_one(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    runner = AsyncRunner([lambda: time.sleep(0.001)] * 2)
    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        runner.start()
    started[0].join(WAIT_S)
    assert not runner.is_running


def test_the_report_tells_who_hangs_from_those_who_only_run_on():
    blocked, taken = threading.Event(), []

    def step():
        taken.append(None)
        if len(taken) == 3:
            blocked.wait(WAIT_S)

    runner = AsyncRunner([lambda: time.sleep(0.001), step, list], max_steps=None)
    runner._steps[2] = iter([None]).__next__  # Ends at its second step.
    with pytest.raises(DeadlineError, match="tower1 hangs inside step 3 for") as caught:
        runner.start().join(0.4)
    assert "tower0 hangs" not in str(caught.value)
    lines = caught.value.report.splitlines()
    missing = [line.split(maxsplit=1)[1] for line in lines if "  missing " in line]
    assert [line.split(" inside ")[0] for line in missing] == [
        "tower0: runs",
        "tower1: hangs",
    ]
    assert "  arrived   tower2" in lines
    assert any("tower1: step 3 for" in line for line in lines)
    assert not any("tower2: " in line for line in lines if " for " in line)
    blocked.set()
    runner.stop()
    assert runner.join(WAIT_S)[2] == 1


def test_the_runner_refuses_a_wrong_order_of_calls():
    runner = AsyncRunner([lambda: None], max_steps=0)
    with pytest.raises(RuntimeError, match="was not started"):
        runner.join()
    assert runner.start().join(WAIT_S) == [0]
    with pytest.raises(RuntimeError, match="was started before"):
        runner.start()
