"""The two ways to run are told apart, in bodies of any depth."""

import tensorflow as tf

from tw_core._mode import (
    builds_session_graph,
    outermost_function_graph,
    traces_function,
)


def ask(answers):
    answers.append((builds_session_graph(), traces_function()))
    return tf.constant(0)


def ask_everywhere(answers):
    """Asks at top level, in a condition, in a loop and in a nested function."""
    ask(answers)
    maybe = tf.less(tf.random.uniform([]), 0.5)
    tf.cond(maybe, lambda: ask(answers), lambda: tf.constant(0))
    tf.while_loop(lambda i: i < 3, lambda i: i + 1 + ask(answers), [tf.constant(0)])
    tf.function(lambda: ask(answers), autograph=False)()


def test_eager_mode_is_neither():
    answers = []
    ask(answers)
    assert answers == [(False, False)]


def test_all_of_a_session_graph_is_a_session_graph(graph):
    answers = []
    ask_everywhere(answers)
    assert len(answers) >= 4
    assert set(answers) == {(True, False)}


def test_all_of_a_function_is_a_function():
    answers = []
    tf.function(lambda: ask_everywhere(answers), autograph=False)()
    assert len(answers) >= 4
    assert set(answers) == {(False, True)}


def test_wrapped_graph_code_is_a_function():
    answers = []
    tf.compat.v1.wrap_function(lambda: ask(answers), [])
    assert answers == [(False, True)]


def test_the_outermost_graph_of_a_trace_is_the_functions():
    graphs = []

    def note():
        graphs.append(outermost_function_graph())
        return tf.constant(0)

    @tf.function(autograph=False)
    def traced():
        graphs.append(tf.compat.v1.get_default_graph())
        note()
        maybe = tf.less(tf.random.uniform([]), 0.5)
        tf.cond(maybe, note, lambda: tf.cond(maybe, note, note))
        tf.function(note)()

    traced()
    assert len(graphs) == 6
    assert all(graph is graphs[0] for graph in graphs)
