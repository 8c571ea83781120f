"""The current tower is kept per thread and graph, at any depth of bodies."""

import threading

import pytest
import tensorflow as tf

from tw_core import TowerContext, get_current_tower_context


def tower(name="tower0"):
    return TowerContext(name, is_training=True)


def see_in_bodies():
    """Asks in the bodies of a condition, a loop and a function, and lifted out."""
    seen, lifted = [], []

    def note(*_):
        seen.append(get_current_tower_context())
        with tf.init_scope():
            lifted.append(get_current_tower_context())
        return tf.constant(0)

    maybe = tf.less(tf.random.uniform([]), 0.5)
    tf.cond(maybe, note, lambda: tf.cond(maybe, note, note))
    tf.while_loop(lambda i: i < 3, lambda i: i + 1 + note(), [tf.constant(0)])
    tf.function(note)()
    assert len(seen) >= 5
    return set(seen), set(lifted)


def test_a_session_graph_and_its_bodies_are_in_the_tower_around_them(graph):
    assert get_current_tower_context() is None
    with tower() as entered:
        assert get_current_tower_context() is entered
        assert see_in_bodies() == ({entered}, {entered})
        with tf.Graph().as_default():
            assert get_current_tower_context() is None
            with tower() as second:
                assert get_current_tower_context() is second
        assert get_current_tower_context() is entered
    assert see_in_bodies() == ({None}, {None})
    with pytest.raises(KeyError, match="boom"), tower("tower1"):
        raise KeyError("boom")
    assert get_current_tower_context() is None


def test_a_function_and_its_bodies_are_in_a_tower_that_lifting_leaves():
    @tf.function(autograph=False)
    def traced():
        with tower() as entered:
            assert get_current_tower_context() is entered
            assert see_in_bodies() == ({entered}, {None})
        assert get_current_tower_context() is None

    assert get_current_tower_context() is None
    traced()


@pytest.mark.timeout(60)
def test_two_threads_build_a_tower_each_at_the_same_time(graph):
    both_inside = threading.Barrier(2, timeout=30)
    seen, same = {}, []

    def build(name):
        with tf.Graph().as_default(), tower(name) as entered:
            both_inside.wait()
            seen[name] = get_current_tower_context() is entered
            x = tf.constant(0)
            both_inside.wait()
            seen[name] &= x.name == f"{name}/Const:0"

    def ask():  # in the graph of another thread, which is in a tower
        with graph.as_default():
            same.append(get_current_tower_context())

    threads = [threading.Thread(target=build, args=[n]) for n in ("towerA", "towerB")]
    threads.append(threading.Thread(target=ask))
    with tower():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
    assert (seen, same) == ({"towerA": True, "towerB": True}, [None])
