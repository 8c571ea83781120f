"""What a tower adds to collections is told apart, and frozen ones are put back."""

import pytest
import tensorflow as tf

from tw_core import TrainTowerContext
from tw_core.contexts import PredictTowerContext, freeze_collections, leave_no_summaries

KEYS = tf.compat.v1.GraphKeys
add = tf.compat.v1.add_to_collection
get = tf.compat.v1.get_collection


def add_one_of_each():
    """Adds a summary, an update, a loss and an item of the user's."""
    item = tf.constant(0)
    for key in (KEYS.SUMMARIES, KEYS.UPDATE_OPS, KEYS.LOSSES, "mine"):
        add(key, item)
    return item


def train(index):
    return TrainTowerContext(f"tower{index}", index=index, total=2)


def test_each_kind_of_tower_leaves_what_it_may_after_an_exception_too(graph):
    with PredictTowerContext("before"):
        none = add_one_of_each()
    assert KEYS.SUMMARIES not in graph.get_all_collection_keys()
    with train(0):
        main = add_one_of_each()
    with train(1):
        other = add_one_of_each()
        assert get(KEYS.SUMMARIES) == [main, other]
    with PredictTowerContext("predict"):
        last = add_one_of_each()
        graph.clear_collection(KEYS.SUMMARIES)
    fails = TrainTowerContext("fails", index=1, total=2)
    with pytest.raises(KeyError, match="boom"), fails:
        tf.compat.v1.summary.scalar("failed", 1.0)
        raise KeyError("boom")
    assert get(KEYS.SUMMARIES) == [main]
    assert get(KEYS.UPDATE_OPS) == [main, other]
    assert get("mine") == get(KEYS.LOSSES) == [none, main, other, last]


@pytest.mark.parametrize("key", [KEYS.SUMMARIES, KEYS.UPDATE_OPS, "mine"])
def test_a_tower_knows_what_it_added_during_and_after(graph, key):
    add(key, "before")
    with PredictTowerContext("predict") as tower:
        assert tower.get_collection_in_tower(key) == []
        item = add_one_of_each()
        assert tower.get_collection_in_tower(key) == [item]
    add(key, "after")
    tower.get_collection_in_tower(key).clear()  # a copy
    assert tower.get_collection_in_tower(key) == [item]
    assert tower.get_collection_in_tower("nobody's") == []
    old, new = [1], [1]  # told apart by identity, not by comparing
    add(key, old)
    with train(0) as tower:
        add(key, new)
    [added] = tower.get_collection_in_tower(key)
    assert added is new


def test_a_function_has_collections_for_one_trace():
    @tf.function(autograph=False)
    def traced(x):
        freeze_collections("mine")
        with PredictTowerContext("predict") as tower:
            add(KEYS.UPDATE_OPS, x)
            add("mine", x)
        assert get(KEYS.UPDATE_OPS) == get("mine") == []
        assert tower.get_collection_in_tower(KEYS.UPDATE_OPS) == [x]

    traced(tf.zeros([1]))
    traced(tf.zeros([2]))


@pytest.mark.parametrize("make", [lambda: train(1), lambda: PredictTowerContext("p")])
def test_a_collection_frozen_by_name_is_left_as_it_was(graph, make):
    freeze_collections("mine", "yours", "mine")
    counts = {k: len(get(k)) for k in graph.get_all_collection_keys()}
    freeze_collections("mine")  # named twice, it is frozen once
    assert {k: len(get(k)) for k in graph.get_all_collection_keys()} == counts
    with train(0):
        first = add_one_of_each()
    with make() as tower:
        second = add_one_of_each()
        add("yours", second)
    assert get("mine") == [first]
    assert "yours" not in graph.get_all_collection_keys()
    assert tower.get_collection_in_tower("mine") == [second]


def test_collections_are_frozen_in_one_graph_only(graph):
    with tf.Graph().as_default() as other:
        freeze_collections("mine", graph=graph)
        with PredictTowerContext("predict"):
            item = add_one_of_each()
        assert other.get_collection("mine") == [item]
    with PredictTowerContext("predict"):
        add_one_of_each()
    assert get("mine") == []


def test_an_exported_graph_keeps_its_frozen_collections(graph):
    v1 = tf.compat.v1
    v1.placeholder(tf.float32, name="x")
    freeze_collections("mine")
    exported = v1.train.export_meta_graph()
    with tf.Graph().as_default():
        v1.train.import_meta_graph(exported)
        with PredictTowerContext("predict"):
            add_one_of_each()
        assert get("mine") == []


def test_a_tower_inside_a_branch_freezes_what_the_graph_does(graph):
    freeze_collections("mine")
    left = []

    def branch():
        with PredictTowerContext("predict"):
            item = add_one_of_each()
        left.extend(get("mine"))
        return item

    tf.cond(tf.constant(True), branch, lambda: tf.constant(1))
    assert left == []


def test_freezing_needs_a_graph():
    with leave_no_summaries():  # of which eager mode has none
        assert tf.executing_eagerly()
    with pytest.raises(
        RuntimeError, match=r"freeze_collections: .*got eager mode.*tf.Gra"
    ):
        freeze_collections("mine")


@pytest.mark.parametrize("error", [None, KeyError("boom")])
def test_code_outside_of_towers_leaves_no_summaries_either(graph, error):
    freeze_collections("mine")
    before = add_one_of_each()
    try:
        with leave_no_summaries():
            inside = add_one_of_each()
            if error:
                raise error
    except KeyError:
        pass
    assert get(KEYS.SUMMARIES) == get("mine") == [before]
    assert get(KEYS.UPDATE_OPS) == [before, inside]
    with leave_no_summaries(enable=False):
        kept = add_one_of_each()
    assert get(KEYS.SUMMARIES) == [before, kept]
