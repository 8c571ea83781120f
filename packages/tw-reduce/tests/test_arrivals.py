"""A call that reduces over towers ends, and names the tower that has not come."""

import threading
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from tw_core import DeadlineError
from tw_core.testing import CPUS
from tw_reduce import sum_collective
from tw_reduce.reducers import CollectiveKeys

WAIT_S = 30.0
BOUND_S = 2.0  # of calls that miss it, and of those before, which take milliseconds
both_modes = pytest.mark.parametrize("mode", ["function", "session"])


class Towers:
    """A step of three towers, one of which waits in Python when it is told to.

    That one alone calls Python: a function runs such ops in the order of building.
    """

    def __init__(self, victim, *, wrap=lambda reduce, x: reduce(x), then=False):
        self.victim, self.go_on = victim, threading.Event()
        self.go_on.set()
        self.fails = False
        self._wrap, self._then = wrap, then

    def build(self, x, keys):
        def wait(value):
            if self.fails:
                raise ValueError("on purpose")
            assert self.go_on.wait(WAIT_S)
            return value

        def reduce(value):
            towers = []
            for k in range(3):
                with tf.device(CPUS[k]):
                    own = value * (k + 1.0)
                    if k == self.victim:
                        own = tf.ensure_shape(
                            tf.numpy_function(wait, [own], tf.float32), [4]
                        )
                    towers.append([own, own[:2]])
            return sum_collective(towers, devices=CPUS[:3], keys=keys)[0][0]

        total = self._wrap(reduce, x)
        if self._then:
            towers = [[x * 0.0]] * 3
            total += sum_collective(towers, devices=CPUS[:3], keys=keys)[0][0]
        return total

    def bounded(self, mode, keys=None, *, timeout_s=WAIT_S):
        """Returns a step that is traced, or built, before it is bounded."""
        if mode == "function":
            keys = keys or CollectiveKeys()
            step = tf.function(partial(self.build, keys=keys), autograph=False)
            run = keys.bounded(step, timeout_s=timeout_s)
            step.get_concrete_function(tf.TensorSpec([4]))
            return lambda: run(tf.ones([4])).numpy()
        keys = keys or CollectiveKeys(note_arrivals=True)
        with tf.Graph().as_default():
            total = self.build(tf.ones([4]), keys)
            config = tf.compat.v1.ConfigProto(device_count={"CPU": len(CPUS)})
            session = tf.compat.v1.Session(config=config)
        run = keys.bounded(session.run, timeout_s=timeout_s, session=session)
        return lambda: run(total)


def missing_in(report):
    lines = report.splitlines()
    return [line.split(None, 1)[1] for line in lines if line.startswith("  missing ")]


def hang(towers, step):
    """Has a step hang that has run, and returns its error; the tower then goes on."""
    towers.go_on.clear()
    try:
        with pytest.raises(DeadlineError) as caught:
            step()
    finally:
        towers.go_on.set()
    return caught.value


@pytest.mark.slow(by_day=["0-function"])
@both_modes
@pytest.mark.parametrize("victim", range(3))
def test_the_tower_that_does_not_come_is_named_and_those_that_wait_for_it(mode, victim):
    towers = Towers(victim)
    step = towers.bounded(mode, timeout_s=BOUND_S)
    for _ in range(3):
        np.testing.assert_array_equal(step(), [6.0] * 4)
    error = hang(towers, step)
    named = [f"tower {k} ({CPUS[k]})" for k in range(3)]
    come = ", ".join(name for k, name in enumerate(named) if k != victim)
    told = f"In sum_collective of 2 gradients {come} arrived, but not {named[victim]}."
    assert told in str(error)
    assert f"  arrived   {come}\n" in error.report
    assert missing_in(error.report) == [
        f"{named[victim]}: its gradients have not arrived"
    ]
    assert f"{named[victim]}: has not reached sum_collective" in error.report
    with pytest.raises(RuntimeError, match=r"an earlier call of .* was abandoned"):
        step()


def in_a_loop(reduce, x):
    body = lambda turn, value: (turn + 1, reduce(value) / 6)  # noqa: E731
    return tf.while_loop(lambda turn, _: turn < 3, body, (0, x))[1]


def in_a_branch(reduce, x):
    return tf.cond(x[0] > -1, lambda: reduce(x), lambda: reduce(-x))


@pytest.mark.slow
@both_modes
@pytest.mark.parametrize("wrap, want", [(in_a_loop, 1.0), (in_a_branch, 6.0)])
def test_arrivals_are_noted_in_loops_and_branches(mode, wrap, want):
    towers = Towers(1, wrap=wrap)
    step = towers.bounded(mode, timeout_s=BOUND_S)
    for _ in range(2):
        np.testing.assert_allclose(step(), [want] * 4)
    (missing,) = missing_in(hang(towers, step).report)
    assert missing.startswith("tower 1 ")


@pytest.mark.slow
@both_modes
def test_neither_another_reduction_nor_a_step_that_failed_counts_as_arrival(mode):
    # In a function the second one waits for the one before it all the same.
    towers = Towers(1, then=True)
    step = towers.bounded(mode, timeout_s=BOUND_S)
    step()
    towers.fails = True
    with pytest.raises(tf.errors.OpError, match="on purpose"):
        step()
    towers.fails = False
    np.testing.assert_array_equal(step(), [6.0] * 4)
    error = hang(towers, step)
    assert "waits for sum_collective of 2 gradients\n" in error.report
    (missing,) = missing_in(error.report)
    assert missing.startswith("tower 1 ")


@pytest.mark.slow
def test_a_call_of_which_nothing_is_known_says_what_to_do():
    towers, go_on = Towers(0), threading.Event()
    step = towers.bounded("session", CollectiveKeys(), timeout_s=BOUND_S)
    step()
    assert "CollectiveKeys(note_arrivals=True)" in str(hang(towers, step))
    with pytest.raises(DeadlineError, match="are unknown"):
        CollectiveKeys().bounded(lambda: go_on.wait(WAIT_S), timeout_s=0.1)()
    go_on.set()


def test_what_a_call_returns_or_raises_comes_through():
    def divide(a, *, by):
        return a / by

    bounded = CollectiveKeys().bounded(divide, timeout_s=WAIT_S)
    assert bounded(6, by=3) == 2
    with pytest.raises(ZeroDivisionError):
        bounded(6, by=0)
    assert bounded(6, by=2) == 3
    assert bounded.__name__ == "divide"


@both_modes
def test_without_a_bound_nothing_is_noted(mode):
    kind = {"function": "AssignAddVariableOp", "session": "LookupTableInsertV2"}[mode]
    for notes in (False, True):
        keys = CollectiveKeys(note_arrivals=notes)
        build = partial(Towers(0).build, keys=keys)
        if mode == "session":
            with tf.Graph().as_default() as graph:
                build(tf.ones([4]))
        else:
            step = tf.function(build, autograph=False)
            graph = step.get_concrete_function(tf.TensorSpec([4])).graph
        assert (kind in {op.type for op in graph.get_operations()}) == notes
