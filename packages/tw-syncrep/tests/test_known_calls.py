"""A session that knows its calls returns and raises what TensorFlow's does.

A private class is imported, as a session of ``training_session`` is made by it alone.
"""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tw_syncrep import training_session
from tw_syncrep._session import creators
from tw_syncrep._session.creators import KnowingSession

v1 = tf.compat.v1
Pair = collections.namedtuple("Pair", ["left", "right"])


class Graph:
    """A graph with a fed vector, a fed number and a variable that counts."""

    def __init__(self):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x = v1.placeholder(tf.float32, [None, 2], name="x")
            self.n = v1.placeholder_with_default(tf.constant(7, tf.int64), [])
            self.any = v1.placeholder_with_default(tf.zeros([1]), None)
            self.small = v1.placeholder_with_default(tf.constant(1, tf.int8), [])
            self.flag = v1.placeholder_with_default(tf.constant(False), [])
            self.total = tf.reduce_sum(self.x)
            self.twice = 2 * self.n
            self.count = v1.get_variable("count", [], tf.int64, use_resource=True)
            self.add = self.count.assign_add(1, read_value=False)
            self.sparse = tf.sparse.from_dense(tf.eye(2))
            self.bad = tf.debugging.check_numerics(1 / self.total, "divided by 0")

    def sessions(self):
        """TensorFlow's, and one that knows its calls."""
        plain, knowing = v1.Session(graph=self.graph), v1.Session(graph=self.graph)
        KnowingSession.adopt(knowing)
        for session in (plain, knowing):
            session.run(self.count.initializer)
            assert isinstance(session, v1.Session)
        return plain, knowing


def rows(count):
    return np.arange(2.0 * count, dtype=np.float32).reshape(count, 2)


FETCHES = {
    "a tensor": lambda g: g.total,
    "an op": lambda g: g.add,
    "a list": lambda g: [g.total, g.add, g.total],
    "a tuple in a list": lambda g: [(g.total, [g.twice]), ()],
    "a dictionary": lambda g: {"b": g.total, 3: {"a": g.add}},
    "as a monitored session": lambda g: {"caller": g.add, Graph: [g.twice]},
    "a variable": lambda g: [g.count, g.total],
    "a name": lambda g: ["x:0", g.total],
    "a sparse tensor": lambda g: [g.sparse, g.total],
    "a named tuple": lambda g: Pair(g.total, g.twice),
    "what is fed": lambda g: [g.x, g.total],
    "nothing": lambda g: [],
}
FEEDS = {
    "an array": lambda g: {g.x: rows(3)},
    "another shape": lambda g: {g.x: rows(5)},
    "a list": lambda g: {g.x: [[1, 2]], g.n: 3},
    "another number": lambda g: {g.x: [[1, 2]], g.n: np.int64(4)},
    "another order": lambda g: {g.n: 5, g.x: [[1, 2]]},
    "any shape": lambda g: {g.x: rows(1), g.any: rows(2)},
    "by name": lambda g: {"x:0": rows(2)},
}


@pytest.mark.parametrize("fetched", FETCHES)
def test_every_call_returns_what_tensorflows_session_does(fetched):
    graph = Graph()
    plain, knowing = graph.sessions()
    for feed in FEEDS.values():
        for _ in range(3):
            # Fetches and feeds are made anew, as callers do.
            want, got = (
                session.run(FETCHES[fetched](graph), feed(graph))
                for session in (plain, knowing)
            )
            assert repr(got) == repr(want)
            assert type(got) is type(want)
    assert knowing.run(graph.count) == plain.run(graph.count)


REFUSED = {
    "another rank": lambda g: {g.x: np.zeros([2], np.float32)},
    "another width": lambda g: {g.x: np.zeros([2, 3], np.float32)},
    "no number": lambda g: {g.x: "text"},
    "rows of unequal length": lambda g: {g.x: [[1, 2], [3]]},
    "a tensor": lambda g: {g.x: g.total},
    "a fraction": lambda g: {g.x: rows(1), g.small: 1.5},
    "too large a number": lambda g: {g.x: rows(1), g.small: 1000},
    "a number for a flag": lambda g: {g.x: rows(1), g.flag: 3},
    "a division by 0": lambda g: {g.x: np.zeros([1, 2], np.float32)},
    "no feed": lambda g: None,
    "no dictionary": lambda g: [g.x],
}


@pytest.mark.parametrize("refused", REFUSED)
def test_what_tensorflow_refuses_is_refused_in_its_words(refused):
    graph = Graph()
    outcomes = []
    for session in graph.sessions():
        for more in ({}, {graph.small: 1}, {graph.flag: True}):
            for _ in range(2):
                session.run([graph.bad, graph.small], {graph.x: rows(1), **more})
        try:
            outcome = session.run([graph.bad, graph.small], REFUSED[refused](graph))
        except Exception as error:
            outcome = type(error), str(error), getattr(error, "op", None)
        outcomes.append(outcome)
    assert repr(outcomes[0]) == repr(outcomes[1])


def test_what_differs_in_items_structure_or_options_is_another_call():
    graph = Graph()
    _, knowing = graph.sessions()
    twice = graph.twice
    fetches = [twice]
    for _ in range(2):
        assert knowing.run(fetches) == [14]
    fetches[0] = graph.count
    assert knowing.run(fetches) == [0]
    for fetches in ([twice], (twice,), {"a": twice}, {"b": twice}, twice) * 3:
        want = tf.nest.map_structure(lambda _: 14, fetches)
        got = knowing.run(fetches)
        assert got == want
        assert type(got) is type(want) or want == 14
    for _ in range(2):
        knowing.run(twice, None, v1.RunOptions(), v1.RunMetadata())
    traced = v1.RunMetadata()
    options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
    assert knowing.run(twice, None, options, traced) == 14
    assert traced.step_stats.dev_stats
    with graph.graph.as_default():
        more = twice + 1  # added after calls
    assert [knowing.run([more, twice]) for _ in range(2)] == [[15, 14]] * 2


def test_a_closed_session_runs_nothing():
    graph = Graph()
    for session in graph.sessions():
        for _ in range(2):
            session.run(graph.twice)
        session.close()
        with pytest.raises(RuntimeError, match="closed Session"):
            session.run(graph.twice)


@pytest.mark.parametrize("is_chief", [True, False])
def test_a_training_session_looks_at_a_call_once(monkeypatch, is_chief):
    made = []

    class Counted(creators.PreparedCall):
        def run(self, session, values):
            made.append(values)
            return super().run(session, values)

    monkeypatch.setattr(creators, "PreparedCall", Counted)
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [])
        twice = 2 * x
        with training_session(is_chief=is_chief, log_step_count_steps=None) as session:
            for n in range(4):
                assert session.run({"twice": [twice]}, {x: n}) == {"twice": [2 * n]}
    assert made == [[1], [2], [3]]
