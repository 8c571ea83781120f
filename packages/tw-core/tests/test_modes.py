"""The two ways to run are told apart, in bodies of any depth."""

# Private import: it finds the graph that a store and a record belong to.

import logging
from functools import partial

import pytest
import tensorflow as tf

from tw_core import (
    Replicated,
    Shared,
    TrainTowerContext,
    VariableStore,
    map_towers,
    towers,
)
from tw_core.contexts import PredictTowerContext, TowerFunc, leave_no_summaries
from tw_core.flat_variables import slots_like_parts
from tw_core.internal import (
    builds_session_graph,
    compiles_with_xla,
    keep_repeated_rows,
    orders_effects,
    record_variables,
    tower_build,
    traces_function,
    without_autograph,
)
from tw_core.synchronized import joined_towers, synchronized_layers
from tw_core.testing import CPUS
from tw_core.variables import override_to_local_variable


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


def test_all_of_a_graph_and_of_a_function_is_told_apart():
    eager, graph, function, wrapped = [], [], [], []
    ask(eager)
    with tf.Graph().as_default():
        ask_everywhere(graph)
    tf.function(lambda: ask_everywhere(function), autograph=False)()
    tf.compat.v1.wrap_function(lambda: ask(wrapped), [])
    assert len(graph) >= 4 and len(function) >= 4
    assert (set(eager), set(graph)) == ({(False, False)}, {(True, False)})
    assert set(function) == set(wrapped) == {(False, True)}


def takes_effect_by_itself(call):
    """Returns whether an assignment that nothing depends on happens in a call."""
    variable = tf.Variable(0.0)
    answers = []

    def assign():
        answers.append(orders_effects())
        variable.assign(1.0, read_value=False)
        return tf.constant(0)

    call(assign)
    assert len(set(answers)) == 1
    return answers[0], variable.numpy() == 1.0


def in_branches(assign):
    maybe = tf.less(tf.random.uniform([]), 2.0)
    return tf.cond(maybe, assign, lambda: tf.constant(0))


def in_loops(assign):
    return tf.while_loop(lambda i: i < 1, lambda i: i + 1 + assign(), [tf.constant(0)])


def test_effects_are_ordered_where_assignments_take_place_by_themselves():
    calls = {
        "eagerly": lambda assign: assign(),
        "in a function": lambda assign: tf.function(assign)(),
        "in its branch": lambda assign: tf.function(lambda: in_branches(assign))(),
        "in its loop": lambda assign: tf.function(lambda: in_loops(assign))(),
        "in its function": lambda assign: tf.function(lambda: tf.function(assign)())(),
        "wrapped": lambda assign: tf.compat.v1.wrap_function(assign, [])(),
    }
    got = {name: takes_effect_by_itself(call) for name, call in calls.items()}
    assert got == {name: (name != "wrapped",) * 2 for name in calls}


def assigned_in_a_session(build):
    """Runs a graph whose assignment only ``build`` can make something depend on."""
    answers = []
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
        variable = tf.compat.v1.get_variable("v", [], initializer=tf.zeros_initializer)

        def assign():
            answers.append(orders_effects())
            variable.assign(1.0, read_value=False)
            return tf.constant(0)

        fetch = build(assign)
        sess.run(variable.initializer)
        sess.run(fetch)
        return answers[0], sess.run(variable) == 1.0


def test_a_session_graph_orders_effects_in_its_functions_alone():
    assert assigned_in_a_session(lambda assign: assign()) == (False, False)
    assert assigned_in_a_session(in_branches) == (False, False)
    assert assigned_in_a_session(in_loops) == (False, False)
    assert assigned_in_a_session(lambda assign: tf.function(assign)()) == (True, True)


def note_xla(answers):
    def body():
        answers.append(compiles_with_xla())
        return tf.constant(0)

    body()
    tf.cond(tf.random.uniform([]) < 0.5, body, body)
    tf.while_loop(lambda i: i < 1, lambda i: i + 1 + body(), [tf.constant(0)])
    tf.function(body, autograph=False)()


def test_only_a_compiled_function_and_what_it_calls_is_compiled_with_xla(graph):
    plain, compiled, within = [], [], []
    assert not compiles_with_xla()
    note_xla(plain)
    tf.function(lambda: note_xla(compiled), jit_compile=True, autograph=False)()
    note_xla(plain)
    inner = tf.function(lambda: note_xla(within), jit_compile=True, autograph=False)

    @tf.function(autograph=False)
    def outer():
        note_xla(plain)
        inner()
        note_xla(plain)

    outer()
    assert len(plain) >= 16 and not any(plain)
    assert len(compiled) >= 4 and all(compiled)
    assert within and all(within)


# AutoGraph converts a function with all that it calls, our code included.

TOWER, OTHER = towers(CPUS[:2])
SCOPES = {
    "joined_towers": partial(joined_towers, 1),
    "keep_repeated_rows": keep_repeated_rows,
    "leave_no_summaries": leave_no_summaries,
    "override_to_local_variable": override_to_local_variable,
    "record_variables": partial(record_variables, TOWER),
    "Replicated.scope": lambda: Replicated().scope(TOWER),
    "Shared.scope": lambda: Shared().scope(TOWER),
    "slots_like_parts": partial(slots_like_parts, []),
    "synchronized_layers": synchronized_layers,
    "Tower.scope": TOWER.scope,
    "tower_build": tower_build,
    "VariableStore.scope": lambda: VariableStore(Shared()).scope(TOWER),
}


@pytest.mark.parametrize(
    "scope",
    [
        *(make for name, make in SCOPES.items() if name != "VariableStore.scope"),
        lambda: Shared((CPUS[1],)).scope(OTHER),
        *(lambda: Replicated().scope(OTHER), OTHER.scope),
        lambda: TrainTowerContext("tower1", index=1, total=2),
    ],
)
def test_an_exception_is_not_hidden_and_leaves_no_scope_open(graph, scope):
    with pytest.raises(KeyError, match="boom"), scope():
        tf.compat.v1.Variable(0.0, trainable=False, name="own")
        raise KeyError("boom")
    made, x = tf.compat.v1.get_variable("v", [1]), tf.constant(0)
    assert (made.name, made.device) == ("v:0", "")
    assert (x.name, x.device) == ("Const:0", "")
    assert made in tf.compat.v1.global_variables()


GRAPH_SCOPES = {
    "TrainTowerContext": partial(TrainTowerContext, "tower0"),
    "PredictTowerContext": partial(PredictTowerContext, "predict"),
    **{name: SCOPES[name] for name in ("Shared.scope", "Replicated.scope")},
    "VariableStore.scope": SCOPES["VariableStore.scope"],
}
ELSEWHERE = {
    "Tower": r"TowerContext.*needs a graph; got eager mode.*tw_core.map_towers",
    "Store": "scope: serves get_variable inside",
    "": r"scope: get_variable keeps no .*VariableStore",
}


@pytest.mark.parametrize("name", GRAPH_SCOPES)
def test_scopes_of_get_variable_code_are_refused_where_they_have_no_effect(name):
    says = next(says for part, says in ELSEWHERE.items() if part in name)
    with pytest.raises(RuntimeError, match=says), GRAPH_SCOPES[name]():
        pass
    if "Store" in name:
        says = r"use Shared.*scope or Replicated.*scope there"
        refused = pytest.raises(RuntimeError, match=says)
        with tf.Graph().as_default(), refused, GRAPH_SCOPES[name]():
            pass


def absolute(x):
    """Branches on a tensor, which only AutoGraph makes possible."""
    if x < 0:
        return -x
    return x


@pytest.fixture
def warned(caplog):
    """Messages of AutoGraph, such as of a function that it cannot read."""
    with caplog.at_level(logging.WARNING, logger="tensorflow"):
        yield caplog.messages


@pytest.mark.parametrize("name", SCOPES)
def test_a_converted_function_enters_scopes_and_branches_inside(name, warned):
    scope = SCOPES[name]

    @tf.function
    def step(x):
        with scope():
            return absolute(x)

    assert float(step(tf.constant(-2.0))) == 2
    assert warned == []


@pytest.mark.parametrize("trace", ["each", "once"])
def test_a_towers_function_is_converted(trace, warned):
    @tf.function
    def step(x):
        each = towers(CPUS[:2])
        return map_towers(lambda tower, x: absolute(x), each, [x, -x], trace=trace)

    assert [float(x) for x in step(tf.constant(-2.0))] == [2, 2]
    assert warned == []


def test_a_tower_function_with_variables_of_its_own_may_branch_on_tensors():
    ours = towers(CPUS[:2])
    store = VariableStore(Replicated())

    def of_sum(x):
        w = tf.compat.v1.get_variable("w", initializer=[1.0, 1.0])
        return absolute(tf.reduce_sum(x * w))

    func = TowerFunc(of_sum, [tf.TensorSpec([2], name="x")])

    @tf.function
    def step(xs):
        sums = []
        for tower, x in zip(ours, xs, strict=True):
            with store.scope(tower), TrainTowerContext(tower.name, tower.name):
                sums.append(func(x))
        return sums

    got = step([tf.constant([-1.0, -2.0]), tf.constant([3.0, 4.0])])
    assert [float(x) for x in got] == [3.0, 7.0]
    assert [store.variables(t)[0].name for t in ours] == ["tower0/w:0", "tower1/w:0"]
    assert [h.ns_name for h in func.towers[-2:]] == ["tower0", "tower1"]


def test_a_marked_function_runs_as_it_is_written(warned):
    seen = []

    @without_autograph
    def library(x):
        """Doubles."""
        seen.append(tf.__internal__.autograph.control_status_ctx().status.name)
        return x + x if len(seen) == 1 else absolute(x)

    step = tf.function(lambda x: library(x))
    assert step(tf.constant(2.0)).numpy() == 4.0
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError, match="symbolic"):
        step(tf.constant([-2.0]))
    assert seen == ["DISABLED"] * 2
    assert (library.__name__, library.__doc__) == ("library", "Doubles.")
    assert warned == []
