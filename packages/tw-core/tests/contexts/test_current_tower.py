"""The current tower is kept per thread and graph, at any depth of bodies."""

import threading

import pytest
import tensorflow as tf

from tw_core import TowerContext, get_current_tower_context


def tower(name="tower0"):
    return TowerContext(name, is_training=True)


def test_outside_of_towers_there_is_none(graph):
    assert get_current_tower_context() is None
    with tower():
        pass
    assert get_current_tower_context() is None


def test_eager_mode_has_none():
    assert get_current_tower_context() is None


def test_inside_a_tower_it_is_that_tower(graph):
    with tower() as entered:
        assert get_current_tower_context() is entered


def test_a_function_has_its_own():
    seen = []

    @tf.function(autograph=False)
    def traced():
        with tower() as entered:
            seen.append(get_current_tower_context() is entered)
        seen.append(get_current_tower_context())

    traced()
    assert seen == [True, None]


def see_in_bodies():
    """Asks in the bodies of a condition, a loop and a function."""
    seen = []

    def note(*_):
        seen.append(get_current_tower_context())
        return tf.constant(0)

    maybe = tf.less(tf.random.uniform([]), 0.5)
    tf.cond(maybe, note, lambda: tf.cond(maybe, note, note))
    tf.while_loop(lambda i: i < 3, lambda i: i + 1 + note(), [tf.constant(0)])
    tf.function(note)()
    return seen


def test_bodies_in_a_session_graph_belong_to_the_tower_around_them(graph):
    with tower() as entered:
        seen = see_in_bodies()
    assert len(seen) >= 5
    assert set(seen) == {entered}
    assert set(see_in_bodies()) == {None}


def test_bodies_in_a_function_belong_to_the_tower_around_them():
    @tf.function(autograph=False)
    def traced():
        with tower() as entered:
            seen = see_in_bodies()
        assert len(seen) >= 5
        assert set(seen) == {entered}

    traced()


def test_lifting_out_of_a_function_leaves_its_tower():
    seen = []

    @tf.function(autograph=False)
    def traced():
        with tower(), tf.init_scope():
            seen.append(get_current_tower_context())

    traced()
    assert seen == [None]


def test_lifting_out_of_a_body_stays_in_the_session_graphs_tower(graph):
    with tower() as entered:

        @tf.function(autograph=False)
        def body():
            with tf.init_scope():
                assert get_current_tower_context() is entered

        body()


def test_two_graphs_have_a_tower_each():
    with tf.Graph().as_default(), tower() as first:
        with tf.Graph().as_default():
            assert get_current_tower_context() is None
            with tower() as second:
                assert get_current_tower_context() is second
            assert get_current_tower_context() is None
        assert get_current_tower_context() is first


@pytest.mark.timeout(60)
def test_two_threads_build_a_tower_each_at_the_same_time():
    both_inside = threading.Barrier(2, timeout=30)
    seen = {}

    def build(name):
        with tf.Graph().as_default(), tower(name) as entered:
            both_inside.wait()
            seen[name] = get_current_tower_context() is entered
            x = tf.constant(0)
            both_inside.wait()
            seen[name] &= x.name == f"{name}/Const:0"

    threads = [threading.Thread(target=build, args=[n]) for n in ("towerA", "towerB")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert seen == {"towerA": True, "towerB": True}


@pytest.mark.timeout(60)
def test_another_thread_at_the_same_graph_is_in_no_tower(graph):
    seen = []

    def ask():
        with graph.as_default():
            seen.append(get_current_tower_context())

    with tower():
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(timeout=30)
    assert seen == [None]


def test_an_exception_leaves_no_tower_behind(graph):
    with pytest.raises(KeyError, match="boom"), tower():
        raise KeyError("boom")
    assert get_current_tower_context() is None
    with tower("tower1") as entered:
        assert get_current_tower_context() is entered
