"""A graph knows which tower made a variable, and what tower 0 calls it."""

import gc
import weakref
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from tw_core import Replicated, Shared, TrainTowerContext, map_towers, replicate, towers
from tw_core._records.origins import base_name, owning_tower  # by names alone
from tw_core.gradients import check_grad_list
from tw_core.internal import record_variables, tower_build
from tw_core.testing import CPUS
from tw_core.variables import VariableOrigin, variable_origin

v1 = tf.compat.v1
OURS = towers(list(CPUS[:3]))


def in_contexts(tower_fn):
    """Calls ``tower_fn`` in the context of each tower; returns what each returns."""
    results = []
    with tower_build():
        for k in range(3):
            vs_name = f"tower{k}" if k else ""
            with TrainTowerContext(f"tower{k}", vs_name, index=k, total=3):
                results.append(tower_fn())
    return results


def in_policies(tower_fn):
    """The same, under ``Replicated``."""

    def build(tower):
        with Replicated().scope(tower):
            return tower_fn()

    return map_towers(build, OURS)


def in_policies_of_an_outer_scope(tower_fn):
    with v1.variable_scope("outer"):
        return in_policies(tower_fn)


each_way = pytest.mark.parametrize(
    "build", [in_contexts, in_policies, in_policies_of_an_outer_scope]
)


def expect_counterparts(made):
    """Checks that variable m of each tower is told to be that of tower 0."""
    for k, own in enumerate(made):
        for variable, original in zip(own, made[0], strict=True):
            want = VariableOrigin(k, original.name.removesuffix(":0"))
            assert variable_origin(variable) == want


@each_way
def test_variables_are_told_by_name_and_by_order(graph, build):
    numbers = iter(range(6))
    orders = iter([["left_1", "left_2"], ["left_2", "left_1"], ["left_1", "left_2"]])

    def model():
        made = [v1.get_variable(f"tower{k}/w", [2]) for k in range(3)]
        with tf.name_scope("layer"), v1.variable_scope("block"):
            made += [
                v1.get_variable("v", [2]),
                tf.Variable(1.0, name="v"),
                tf.Variable(2.0, name="v"),
                v1.Variable(3.0, name="tower1"),
            ]
        # Numbers that count on are told by order; where names are the same, by these.
        made += [tf.Variable(1.0, name=f"dense_{next(numbers)}") for _ in range(2)]
        named = {name: v1.get_variable(name, [2]) for name in next(orders)}
        return made + [named[name] for name in sorted(named)]

    expect_counterparts(build(model))


def test_builds_differ_in_their_towers_and_towers_in_their_variables(graph):
    towers_left = iter(range(3))

    def model():
        names = ["a", "b_1", "b_2"] if next(towers_left) == 1 else ["a", "b_3"]
        return [v1.get_variable(name, [2]) for name in names]

    _, made, _ = in_contexts(model)
    assert variable_origin(made[0]) == VariableOrigin(1, "a")
    assert variable_origin(made[1]) == VariableOrigin(1, "tower1/b_1")
    for count in (1, 3):
        made = []
        with tower_build():
            for tower in OURS[:count]:
                with record_variables(tower), tf.name_scope(f"{tower.name}/"):
                    made.append([tf.Variable(1.0, name="power")])
        expect_counterparts(made)


@pytest.mark.parametrize("name", ["x{}", "x_{}", "data/x_{}"])
def test_local_variables_that_towers_number_are_no_copies(graph, name):
    numbers = iter(range(3))

    def model():
        own = name.format(next(numbers))
        collections = [v1.GraphKeys.LOCAL_VARIABLES]
        return [
            v1.Variable(1.0, name=own, collections=collections),
            v1.Variable(1.0, name="kept", collections=collections),
        ]

    made = in_contexts(model)
    expect_counterparts([[kept] for _, kept in made])
    for k, (data, _) in enumerate(made):
        own = data.name.removesuffix(":0")
        assert variable_origin(data) == VariableOrigin(k, own)


def test_copies_are_local_and_leave_no_summaries_from_tower_1_on(graph):
    summaries = []
    for tower in OURS[:2]:
        with record_variables(tower, are_copies=True), tf.name_scope(f"{tower.name}/"):
            made = tf.Variable(1.0, name="power")
            summaries.append(v1.summary.scalar("power", 1.0))
        assert variable_origin(made).tower == tower.index
        assert (made in v1.global_variables()) == tower.is_main
        assert (made in v1.local_variables()) != tower.is_main
        assert made in v1.trainable_variables()
    assert graph.get_collection(v1.GraphKeys.SUMMARIES) == summaries[:1]


def test_slots_and_averages_follow_their_variable(graph):
    made = in_contexts(lambda: [v1.get_variable(f"tower{k}/w", [2]) for k in range(2)])
    everything = [v for own in made for v in own]
    one = tf.ones([2])
    v1.train.AdamOptimizer(0.1).apply_gradients([(one, v) for v in everything])
    average = tf.train.ExponentialMovingAverage(0.9)
    average.apply(everything)
    for k, own in enumerate(made):
        for variable, original in zip(own, made[0], strict=True):
            name = f"{original.op.name}/ExponentialMovingAverage"
            assert variable_origin(average.average(variable)) == VariableOrigin(k, name)
    [slot] = [v for v in v1.global_variables() if v.name == "tower1/tower0/w/Adam_1:0"]
    assert variable_origin(slot) == VariableOrigin(1, "tower0/w/Adam_1")


def test_keras_models_of_a_session_graph_are_copies(graph):
    def factory(tower):
        return keras.Sequential(
            [keras.Input([3]), keras.layers.Dense(4), keras.layers.Dense(1)]
        )

    models = replicate(OURS, factory)
    expect_counterparts([[v.value for v in model.variables] for model in models])
    assert variable_origin(models[2].variables[0]).tower == 2


def test_what_no_tower_made_has_no_origin_and_what_is_shared_tower_0s():
    with OURS[1].scope():
        assert variable_origin(tf.Variable(1.0, name="tower1/w")) is None  # eagerly
    with tf.Graph().as_default():
        assert variable_origin(v1.get_variable("tower1/w", [2])) is None
        in_contexts(lambda: v1.get_variable("v", [2]))
        assert variable_origin(v1.get_variable("tower2/w", [2])) is None

        def build(tower):
            with Shared().scope(tower):
                return v1.get_variable("tower1/s", [2])

        *_, made = map_towers(build, OURS)
        assert variable_origin(made) == VariableOrigin(0, "tower1/s")


def test_a_graph_with_a_record_can_be_freed():
    with tf.Graph().as_default() as graph:
        in_contexts(lambda: v1.get_variable("w", [2]))
        gone = weakref.ref(graph)
    del graph
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("where", ["wrapped", "a branch"])
def test_variables_of_bodies_are_recorded_in_their_graph(where):
    origins = []

    def body():
        made = in_policies(lambda: v1.get_variable("tower1/w", [2]))
        origins.extend(variable_origin(v) for v in made)
        for tower, variable in zip(OURS, made, strict=True):
            [own] = Replicated().trainable_variables(tower)
            assert own is variable
        return tf.constant(0)

    if where == "wrapped":
        v1.wrap_function(body, [])
    else:
        with tf.Graph().as_default():
            tf.cond(tf.constant(True), body, lambda: tf.constant(0))
    assert origins == [VariableOrigin(k, "tower1/w") for k in range(3)]


def test_gradients_in_another_order_are_refused_whatever_scopes_are_called(graph):
    made = in_contexts(lambda: [v1.get_variable(f"tower{k}/w", [2]) for k in range(2)])
    one = tf.ones([2])
    pairs = [[(one, v) for v in own] for own in made]
    check_grad_list(pairs)
    pairs[1].reverse()
    with pytest.raises(ValueError, match=r"tower 1 has the order \['tower1/w', 'tow"):
        check_grad_list(pairs)


@pytest.mark.parametrize(
    ("name", "base", "owner"),
    [
        ("w:0", "w", 0),
        ("tower1/w:0", "w", 1),
        ("tower12/layer/w:0", "layer/w", 12),
        ("outer/tower1/w:0", "outer/w", 1),
        ("tower0/w", "w", 0),
        ("towers/w", "towers/w", 0),
        ("mytower1/w", "mytower1/w", 0),
        ("tower1", "tower1", 0),
    ],
)
def test_a_name_without_its_tower(name, base, owner):
    assert base_name(SimpleNamespace(name=name)) == base
    assert owning_tower(SimpleNamespace(name=name)) == owner
    variable = SimpleNamespace(path="tower1/dense/kernel", name="kernel")  # of Keras
    assert base_name(variable) == "dense/kernel"
