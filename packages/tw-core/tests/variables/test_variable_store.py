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


def test_shared_variables_are_made_once_on_tower_0_or_given_devices():
    store = VariableStore(Shared())
    assert store.variables(TOWERS[1]) == []
    run(store, lambda: ones("a", "b"))
    assert names(store.variables(TOWERS[0])) == ["a:0", "b:0"]
    assert store.variables(TOWERS[1]) == store.variables(TOWERS[0])
    assert set(devices(store.variables(TOWERS[0]))) == {"/device:CPU:4"}
    store = VariableStore(Shared(("/cpu:1", "/cpu:2")))  # spread by bytes

    def model():
        for name, size in (("a", 100), ("b", 60), ("c", 10), ("d", 40)):
            v1.get_variable(name, [size])
        return tf.constant(0)

    run(store, model)
    assert [name[-1] for name in devices(store.variables(TOWERS[0]))] == [*"1222"]


def test_replicated_variables_are_each_towers_own_on_its_device():
    store = VariableStore(Replicated())
    value = np.array([1, 2, 3])

    def model():
        with tf.device("/cpu:0"):  # whatever device is in force
            n = v1.get_variable("n", initializer=value) + 0
            mean = v1.get_variable("mean", initializer=0.0, trainable=False)
            return ones("a", constraint=tf.nn.relu)[0] * mean.assign_add(1.0), n

    assert run(store, lambda: model()[0], times=3) == [3.0, 3.0]
    for k, prefix in enumerate(("", "tower1/")):
        n, mean, a = store.variables(TOWERS[k])
        assert names([n, mean, a]) == [f"{prefix}{v}:0" for v in ("n", "mean", "a")]
        assert set(devices([n, mean, a])) == {f"/device:CPU:{4 + k}"}
        assert store.trainable_variables(TOWERS[k]) == [n, a]
        assert a.constraint is tf.nn.relu
        assert n.dtype == tf.int64
        np.testing.assert_array_equal(n, value)


def test_replicas_start_with_tower_0s_present_values():
    store = VariableStore(Replicated())
    noise = {"initializer": v1.random_uniform_initializer()}
    first, second = run(store, lambda: ones("a", **noise))
    np.testing.assert_array_equal(first, second)
    assert len(set(first)) == 3


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

    @tf.function(autograph=False)
    def predict():  # Another function finds them too.
        with store.scope(TOWERS[0]):
            return v1.get_variable("w", [3]) + 2.0

    np.testing.assert_array_equal(predict(), [4.0, 5.0, 6.0])


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
                ones("c", regularizer=lambda w: None)  # adds none
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


# Values as initializers, reuse.


@pytest.mark.parametrize("reuse", [True, v1.AUTO_REUSE])
def test_reuse_and_custom_getters_find_the_variable_of_the_same_trace(reuse):
    store = VariableStore(Replicated())

    def doubled(getter, name, *args, **kwargs):
        return 2 * getter(name, *args, **kwargs)

    def model():
        first = ones("w")
        with v1.variable_scope("", reuse=reuse, custom_getter=doubled):
            own = ones("w")
            return first + (own if reuse is True else own + 0 * ones("other", "other"))

    np.testing.assert_array_equal(run(store, model), np.full([2, 3], 3.0))
    assert len(store.variables(TOWERS[0])) == (1 if reuse is True else 2)


# What is refused.


def reusing(**asked):
    if not asked:
        with v1.variable_scope("", reuse=True):
            return ones("w")
    ones("w")
    with v1.variable_scope("", reuse=True):
        return v1.get_variable("w", **asked)


SHARED, OWN = Shared(), Replicated()
TWICE = "makes the variable 'w' twice; use another"
# What models do in the calls before the last one, and in the last.
REFUSED = {
    "twice": (SHARED, [lambda: ones("w", "w")], f"tower0 {TWICE}"),
    "twice in a replica": (OWN, [lambda: ones("w"), lambda: ones("w", "w")], TWICE),
    "not made": (
        SHARED,
        [reusing],
        "tower0 reuses the variable 'w', which does not exist",
    ),
    "of its own": (
        SHARED,
        [lambda: ones("w1"), lambda: ones("w2")],
        "tower1 reuses the variable 'w2', which does not exist",
    ),
    "not of tower 0": (
        OWN,
        [lambda: ones("w", "w1"), lambda: ones("w", "w2")],
        r"tower1 makes the variable 'w2', which tower0 .*; tower0 has \['w', 'w1'\]",
    ),
    "shape": (
        SHARED,
        [lambda: reusing(shape=[2])],
        r"'w:0' has the shape \(3,\) and dtype float32; tower0 asks for",
    ),
    "dtype": (
        SHARED,
        [lambda: reusing(shape=[3], dtype=tf.float64)],
        r"'w:0' has the shape \(3,\) and dtype float32; tower0 asks for",
    ),
    "initializer": (
        SHARED,
        [lambda: v1.get_variable("w", [3], initializer=lambda: tf.ones([2]))],
        r"has the shape \(2,\) and dtype float32; tower0 asks for \(3,\)",
    ),
    "partitioner": (
        SHARED,
        [lambda: ones("w", partitioner=v1.fixed_size_partitioner(2))],
        "'w' has a partitioner; partitioned variables work in a session",
    ),
}


@pytest.mark.parametrize(("policy", "calls", "says"), REFUSED.values(), ids=REFUSED)
def test_what_a_model_cannot_make_is_refused(policy, calls, says):
    v1.get_variable_scope()  # From now on the eager scope around is AUTO_REUSE.
    left = iter(calls)
    with pytest.raises(ValueError, match=says):
        run(VariableStore(policy), lambda: next(left)())


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
