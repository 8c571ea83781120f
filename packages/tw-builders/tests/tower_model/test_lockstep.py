"""Functions that run side by side, meet, and end together."""

import threading

import pytest
import tensorflow as tf

from tw_builders.tower_model._lockstep import meet, run_in_lockstep, tower_index
from tw_core import towers
from tw_core.testing import run_eagerly, run_in_function, run_in_graph

OURS = towers(["/cpu:0", "/cpu:1", "/cpu:2"])
MODES = {"graph": run_in_graph, "function": run_in_function, "eager": run_eagerly}
each_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def no_thread_stays():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def sums(place, brought):
    return [sum(brought)] * len(brought)


@each_mode
def test_each_goes_on_with_what_all_brought(mode):
    def of_tower(k):
        def run():
            with tf.device("/cpu:0"):
                first = meet("first", tf.constant(k + 1.0))
            return first, meet("second", first * k)

        return run

    def fn():
        return run_in_lockstep([of_tower(k) for k in range(3)], OURS, sums)

    assert [tuple(own) for own in MODES[mode](fn)] == [(6, 18)] * 3


def test_towers_take_turns_and_all_meet_before_any_goes_on():
    seen = []

    def of_tower(k):
        def run():
            seen.append(("begins", k, tower_index()))
            meet("here", None)
            seen.append(("goes on", k, tower_index()))

        return run

    def combine(place, brought):
        seen.append((place, tower_index(), threading.current_thread().name))
        return brought

    run_in_lockstep([of_tower(k) for k in range(3)], OURS, combine)
    me = threading.current_thread().name
    assert seen == [
        *[("begins", k, k) for k in range(3)],
        ("here", None, me),
        *[("goes on", k, k) for k in range(3)],
    ]


@pytest.mark.parametrize("in_scope", [True, False])
def test_ops_have_their_towers_device_and_name(in_scope):
    with tf.Graph().as_default() as graph:

        def run():
            with tf.name_scope("layer"), tf.device("/gpu:7"):
                pass
            meet("apply", None)
            return tf.constant(1.0, name="c")

        with tf.name_scope("step" if in_scope else "") as scope:
            made = run_in_lockstep([run] * 3, OURS, lambda _, brought: brought)
        outside = tf.constant(2.0, name="outside")
    names = [tensor.op.name for tensor in made]
    assert names == [f"{scope}tower{k}/c" for k in range(3)]
    assert [t.device for t in made] == [f"/device:CPU:{k}" for k in range(3)]
    assert outside.device == ""
    assert graph.get_name_scope() == ""


def test_a_gradient_tape_sees_its_own_towers_ops():
    variables = [tf.Variable(float(k + 1)) for k in range(3)]

    @tf.function
    def step():
        def of_tower(k):
            def run():
                with tf.GradientTape() as tape:
                    loss = variables[k] ** 2 * meet("scale", tf.constant(2.0))
                return tape.gradient(loss, variables[k])

            return run

        return run_in_lockstep([of_tower(k) for k in range(3)], OURS, sums)

    assert [float(g) for g in step()] == [12, 24, 36]


def test_towers_that_meet_for_different_things_are_named():
    def of_tower(k):
        return lambda: meet("a" if k else "b", 0)

    with pytest.raises(
        ValueError, match=r"same order; here they came to \['b', 'a', 'a'"
    ):
        run_in_lockstep([of_tower(k) for k in range(3)], OURS, sums)


def test_a_tower_that_ends_early_is_named():
    def of_tower(k):
        return lambda: None if k == 1 else meet("a", 0)

    with pytest.raises(ValueError, match=r"\['a', 'the end', 'a'\]"):
        run_in_lockstep([of_tower(k) for k in range(3)], OURS, sums)


@each_mode
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_tower_ends_all_with_a_note(mode, error):
    ended = []

    def of_tower(k):
        def run():
            try:
                meet("a", 0)
                if k == 1:
                    raise error("mine")
                meet("b", 0)
            finally:
                ended.append(k)

        return run

    def fn():
        return run_in_lockstep([of_tower(k) for k in range(3)], OURS, sums)

    with pytest.raises(error, match="mine") as caught:
        MODES[mode](fn)
    assert "(in tower1 of 3, on /cpu:1)" in caught.value.__notes__
    assert sorted(ended) == [0, 1, 2]


def test_an_error_where_they_meet_ends_all():
    def combine(place, brought):
        raise ZeroDivisionError(place)

    with pytest.raises(ZeroDivisionError, match="a"):
        run_in_lockstep([lambda: meet("a", 0)] * 3, OURS, combine)


def test_except_exception_in_a_tower_does_not_keep_it():
    def of_tower(k):
        def run():
            try:
                meet("a", 0)
            except Exception:
                pytest.fail("caught what ends the tower")

        return run if k else lambda: 1 / 0

    with pytest.raises(ZeroDivisionError):
        run_in_lockstep([of_tower(k) for k in range(3)], OURS, sums)


def test_meeting_outside_of_towers_is_refused():
    with pytest.raises(RuntimeError, match="for functions that run_in_lockstep runs"):
        meet("a", 0)
