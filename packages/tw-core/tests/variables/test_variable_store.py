"""``get_variable`` code in a ``tf.function`` finds its variables in every trace."""

import numpy as np
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
from tw_core.devices import canonical_device
from tw_core.testing import run_in_graph

v1 = tf.compat.v1
TOWERS = towers(["/cpu:4", "/cpu:5"])
KEYS = v1.GraphKeys


def ones(*names, **kwargs):
    """Sums variables of ones by these names."""
    kwargs = {"initializer": v1.ones_initializer(), **kwargs}
    return tf.add_n([v1.get_variable(name, [3], **kwargs) for name in names])


def run(store, fn, *args, times=1):
    """Calls ``fn`` in each tower of a ``tf.function``, ``times`` times."""

    def in_tower(tower, *args):
        with store.scope(tower):
            return fn(*args)

    @tf.function(autograph=False)
    def traced(*args):
        return map_towers(lambda t: in_tower(t, *args), TOWERS)

    for _ in range(times):
        result = traced(*args)
    return [r.numpy() for r in result]


def names(variables):
    return [v.name for v in variables]


def devices(variables):
    return [canonical_device(v.device) for v in variables]


# Whose variables, and where.


def test_shared_variables_are_made_once_on_tower_0():
    store = VariableStore(Shared())
    run(store, lambda: ones("a", "b"))
    assert names(store.variables(TOWERS[0])) == ["a:0", "b:0"]
    assert store.variables(TOWERS[1]) == store.variables(TOWERS[0])
    assert set(devices(store.variables(TOWERS[0]))) == {"/device:CPU:4"}


def test_shared_variables_are_spread_over_given_devices_by_bytes():
    store = VariableStore(Shared(("/cpu:1", "/cpu:2")))

    def model():
        for name, size in (("a", 100), ("b", 60), ("c", 10), ("d", 40)):
            v1.get_variable(name, [size])
        return tf.constant(0)

    run(store, model)
    assert devices(store.variables(TOWERS[0])) == [
        f"/device:CPU:{i}" for i in (1, 2, 2, 2)
    ]


def test_replicated_variables_are_each_towers_own_on_its_device():
    store = VariableStore(Replicated())
    run(store, lambda: ones("a", "b"))
    assert names(store.variables(TOWERS[0])) == ["a:0", "b:0"]
    assert names(store.variables(TOWERS[1])) == ["tower1/a:0", "tower1/b:0"]
    assert set(devices(store.variables(TOWERS[1]))) == {"/device:CPU:5"}


def test_variables_are_on_the_towers_device_whatever_device_is_in_force():
    store = VariableStore(Replicated())

    @tf.function(autograph=False)
    def traced():
        for tower in TOWERS:
            with tf.device("/cpu:0"), store.scope(tower):
                ones("w")
        return 0

    traced()
    assert devices([store.variables(t)[0] for t in TOWERS]) == [
        "/device:CPU:4",
        "/device:CPU:5",
    ]


def test_replicas_start_with_tower_0s_present_values():
    store = VariableStore(Replicated())
    noise = {"initializer": v1.random_uniform_initializer()}
    first, second = run(store, lambda: ones("a", **noise))
    np.testing.assert_array_equal(first, second)
    assert len(set(first)) == 3


@pytest.mark.parametrize("policy", [Shared(), Replicated()])
def test_a_store_that_served_nothing_has_no_variables(policy):
    assert VariableStore(policy).variables(TOWERS[1]) == []


def test_trainable_variables_are_told_apart():
    store = VariableStore(Shared())

    def model():
        on_read = {"synchronization": tf.VariableSynchronization.ON_READ}
        v1.get_variable("metric", [], aggregation=tf.VariableAggregation.SUM, **on_read)
        v1.get_local_variable("count", [])
        return ones("a") + ones("moving_mean", trainable=False)

    run(store, model)
    assert names(store.variables(TOWERS[0])) == [
        "metric:0",
        "count:0",
        "a:0",
        "moving_mean:0",
    ]
    assert names(store.trainable_variables(TOWERS[0])) == ["a:0"]


def test_a_replicas_variable_is_trainable_where_tower_0s_is():
    store = VariableStore(Replicated())
    run(store, lambda: ones("a") + ones("b", trainable=False))
    assert names(store.trainable_variables(TOWERS[1])) == ["tower1/a:0"]


def test_variable_scopes_and_tower_contexts_name_variables_as_in_a_session_graph():
    def model():
        with v1.variable_scope(None, default_name="layer"):
            v1.get_variable("w", [1])
        with v1.variable_scope("named", dtype=tf.float16):
            return v1.get_variable("w", [1])

    def in_context(tower):
        with TrainTowerContext(
            tower.name, "" if tower.is_main else tower.name, tower.index, tower.total
        ):
            return model()

    store = VariableStore(Replicated())

    @tf.function(autograph=False)
    def traced():
        for tower in TOWERS:
            with tf.device(tower.device), store.scope(tower):
                half = in_context(tower)
        assert half.dtype == tf.float16
        return 0

    traced()
    traced()
    with tf.Graph().as_default():
        for tower in TOWERS:
            in_context(tower)
        theirs = v1.global_variables()
    made = [v for tower in TOWERS for v in store.variables(tower)]
    assert names(made) == names(theirs)


# Over traces.


def test_every_trace_finds_the_same_variables():
    store = VariableStore(Shared())
    traces = []

    @tf.function(autograph=False)
    def step(x):
        traces.append(x.shape)
        with store.scope(TOWERS[0]):
            return tf.reduce_sum(ones("w") * tf.reduce_sum(x))

    assert step(tf.ones([1])) == 3.0
    (w,) = store.variables(TOWERS[0])
    w.assign([2.0, 3.0, 4.0])
    assert step(tf.ones([2])) == 18.0
    assert len(set(map(str, traces))) == 2
    assert store.variables(TOWERS[0]) == [w]


def test_two_functions_share_a_store():
    store = VariableStore(Shared())

    @tf.function(autograph=False)
    def train():
        with store.scope(TOWERS[0]):
            return v1.get_variable("w", [], initializer=v1.ones_initializer()) + 1.0

    @tf.function(autograph=False)
    def predict():
        with store.scope(TOWERS[0]):
            return v1.get_variable("w", []) + 2.0

    assert train() == 2.0
    store.variables(TOWERS[0])[0].assign(5.0)
    assert predict() == 7.0
    assert len(store.variables(TOWERS[0])) == 1


def test_bodies_find_the_functions_variables():
    store = VariableStore(Shared())

    @tf.function(autograph=False)
    def traced(flag):
        with store.scope(TOWERS[0]):
            tf.cond(flag, lambda: ones("w"), lambda: ones("other"))
            with v1.variable_scope("", reuse=True):
                return tf.cond(flag, lambda: ones("w"), lambda: ones("other"))

    traced(tf.constant(True))
    assert sorted(names(store.variables(TOWERS[0]))) == ["other:0", "w:0"]


def test_a_trace_that_fails_does_not_spoil_the_next():
    store = VariableStore(Replicated())
    fail = [True]

    def model():
        total = ones("w")
        if fail:
            fail.clear()
            raise KeyError("boom")
        return total

    with pytest.raises(KeyError, match="boom"):
        run(store, model)
    np.testing.assert_array_equal(run(store, model), np.ones([2, 3]))
    assert len(store.variables(TOWERS[1])) == 1


# Gradients and losses.


@pytest.mark.parametrize("policy", [Shared(), Replicated()])
def test_training_agrees_with_a_session_graph(policy):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)

    def step(scope, variables_of):
        def in_tower(tower, row):
            with scope(tower):
                w = v1.get_variable("w", [3], initializer=v1.ones_initializer())
                loss = tf.reduce_sum((w * row) ** 2)
            return tf.gradients(loss, variables_of(tower))[0]

        return map_towers(in_tower, TOWERS, list(x))

    store = VariableStore(policy)
    traced = tf.function(
        lambda: step(store.scope, store.trainable_variables), autograph=False
    )
    for ours, theirs in zip(
        traced(),
        run_in_graph(lambda: step(policy.scope, policy.trainable_variables)),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


def l2(w):
    return tf.reduce_sum(w**2)


@pytest.mark.parametrize(("policy", "losses"), [(Shared(), 2), (Replicated(), 4)])
def test_a_regularizer_adds_one_loss_a_variable_in_every_trace(policy, losses):
    store = VariableStore(policy)
    counts = []

    @tf.function(autograph=False)
    def traced(x):
        def in_tower(tower):
            with store.scope(tower):
                return ones("a", "b", regularizer=l2)

        map_towers(in_tower, TOWERS)
        with store.scope(TOWERS[0]), v1.variable_scope("", reuse=True):
            ones("a", regularizer=l2)
        found = v1.get_collection(KEYS.REGULARIZATION_LOSSES)
        counts.append(len(found))
        return tf.add_n(found)

    for size in (1, 2):
        assert traced(tf.zeros([size])) == 3.0 * losses
    assert set(counts) == {losses}
    assert len(counts) >= 3  # TensorFlow traces twice where variables are made


def test_a_regularizer_may_return_nothing():
    store = VariableStore(Shared())
    found = []

    def model():
        total = ones("a", regularizer=lambda w: None)
        found.extend(v1.get_collection(KEYS.REGULARIZATION_LOSSES))
        return total

    run(store, model)
    assert found == []


def test_a_constraint_is_kept():
    store = VariableStore(Replicated())
    run(store, lambda: ones("a", constraint=tf.nn.relu))
    assert [store.variables(t)[0].constraint for t in TOWERS] == [tf.nn.relu] * 2


def test_batch_norm_like_statistics_are_updated():
    store = VariableStore(Replicated())

    def model():
        mean = v1.get_variable(
            "mean", [], initializer=v1.zeros_initializer(), trainable=False
        )
        return mean.assign_add(1.0)

    np.testing.assert_array_equal(run(store, model, times=3), [3.0, 3.0])


# Values as initializers, reuse.


def test_a_value_keeps_its_dtype_in_every_tower_and_trace():
    store = VariableStore(Replicated())
    value = np.array([1, 2, 3])
    run(store, lambda: v1.get_variable("n", initializer=value) + 0, times=2)
    for tower in TOWERS:
        (n,) = store.variables(tower)
        assert n.dtype == tf.int64
        np.testing.assert_array_equal(n, value)


@pytest.mark.parametrize("reuse", [True, v1.AUTO_REUSE])
def test_reuse_finds_the_variable_of_the_same_trace(reuse):
    store = VariableStore(Replicated())

    def model():
        first = ones("w")
        with v1.variable_scope("", reuse=reuse):
            return first + ones("w")

    np.testing.assert_array_equal(run(store, model), np.full([2, 3], 2.0))


def test_auto_reuse_makes_what_is_missing():
    store = VariableStore(Shared())

    def model():
        with v1.variable_scope("", reuse=v1.AUTO_REUSE):
            return ones("w") + ones("w")

    run(store, model)
    assert names(store.variables(TOWERS[0])) == ["w:0"]


def test_a_custom_getter_of_the_user_sees_the_stores_variable():
    store = VariableStore(Shared())

    def doubled(getter, name, *args, **kwargs):
        return 2 * getter(name, *args, **kwargs)

    def model():
        with v1.variable_scope("", custom_getter=doubled):
            return ones("w")

    np.testing.assert_array_equal(run(store, model), np.full([2, 3], 2.0))


# What is refused.


def refused(match, fn, policy=None, error=ValueError):
    with pytest.raises(error, match=match):
        run(VariableStore(policy or Shared()), fn)


def test_a_name_made_twice_is_refused():
    v1.get_variable_scope()  # From now on the eager scope around is AUTO_REUSE.
    refused("tower0 makes the variable 'w' twice; use another", lambda: ones("w", "w"))


def test_a_replicas_name_made_twice_is_refused():
    count = []

    def model():
        count.append(0)
        return ones("w") if len(count) == 1 else ones("w", "w")

    refused("tower1 makes the variable 'w' twice; use another", model, Replicated())


def test_reusing_what_nothing_has_made_is_refused():
    def model():
        with v1.variable_scope("", reuse=True):
            return ones("w")

    refused("tower0 reuses the variable 'w', which nothing has made", model)


def test_a_tower_that_shares_makes_nothing_of_its_own():
    count = []

    def model():
        count.append(0)
        return ones(f"w{len(count)}")

    refused("tower1 reuses the variable 'w2', which nothing has made", model)


def test_a_replica_that_tower_0_does_not_have_is_refused():
    count = []

    def model():
        count.append(0)
        return ones("w", f"w{len(count)}")

    want = r"tower1 makes the variable 'w2', which tower0 .*; tower0 has \['w', 'w1'\]"
    refused(want, model, Replicated())


@pytest.mark.parametrize("other", [{"shape": [2]}, {"shape": [3], "dtype": tf.float64}])
def test_another_shape_or_dtype_is_refused(other):
    def model():
        ones("w")
        with v1.variable_scope("", reuse=True):
            return v1.get_variable("w", **other)

    refused(r"'w:0' has the shape \(3,\) and dtype float32; tower0 asks for", model)


def test_an_initializer_of_another_shape_is_refused():
    def model():
        return v1.get_variable("w", [3], initializer=lambda: tf.ones([2]))

    refused(r"has the shape \(2,\) and dtype float32; tower0 asks for \(3,\)", model)


def test_a_partitioner_is_refused():
    def model():
        return ones("w", partitioner=v1.fixed_size_partitioner(2))

    refused("'w' has a partitioner; partitioned variables work in a session", model)


def test_eager_mode_is_refused():
    with (
        pytest.raises(
            RuntimeError, match=r"VariableStore.scope: serves get_variable ins"
        ),
        VariableStore(Shared()).scope(TOWERS[0]),
    ):
        pass


def test_a_session_graph_is_refused(graph):
    with (
        pytest.raises(
            RuntimeError, match=r"use Shared.*scope or Replicated.*scope there"
        ),
        VariableStore(Replicated()).scope(TOWERS[0]),
    ):
        pass


@pytest.mark.parametrize(
    ("policy", "device"), [(Shared(), "/cpu:99"), (Shared(("/cpu:99",)), "/cpu:0")]
)
def test_an_unknown_device_is_refused(policy, device):
    store = VariableStore(policy)
    (tower,) = towers([device])

    @tf.function(autograph=False)
    def traced():
        with store.scope(tower):
            return ones("w")

    with pytest.raises(ValueError, match=r"Unknown .*/cpu:99'\]"):
        traced()
