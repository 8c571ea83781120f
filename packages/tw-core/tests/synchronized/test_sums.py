"""Towers are summed inside a model, and gradients go back through the sums.

The oracle is one device that takes the rows of all towers.
"""

import threading

import numpy as np
import pytest
import tensorflow as tf

from tw_core import Tower, TrainTowerContext, map_towers, towers
from tw_core.internal import call_towers_once, traces_function
from tw_core.synchronized import (
    joined_towers,
    moments_over_towers,
    sum_over_towers,
    synchronized_layers,
)
from tw_core.testing import CPUS, run_eagerly, run_in_function, run_in_graph

v1 = tf.compat.v1
BOTH = pytest.mark.parametrize("run", [run_in_graph, run_in_function])
TINY = 1e-12  # float64, sums of other orders
X = np.random.default_rng(1).normal(3.0, 2.0, [12, 4])
SIZES = {
    "uneven": [7, 4, 1],
    "one empty": [5, 0, 7],
    "the first empty": [0, 12],
    "four uneven": [1, 5, 2, 4],
    "one tower": [12],
}
PARTS = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def ours(total):
    return towers(list(CPUS[:total]))


def normalised(x, axes=(0,)):
    mean, variance = moments_over_towers(x, axes, keepdims=True)
    return (x - mean) / tf.sqrt(variance + 0.1)


def model(x, w):
    """Two normalised layers, the second one in a residual branch."""
    hidden = tf.nn.softplus(normalised(x @ w))
    hidden += normalised(hidden @ w)
    return tf.reduce_sum(hidden**2 * tf.sin(x))


def loss_and_gradient(x, w, how="tape"):
    if how == "gradients":
        loss = model(x, w)
        return [loss, *tf.gradients(loss, [w, x])]
    with tf.GradientTape() as tape:
        tape.watch([w, x])
        loss = model(x, w)
    return [loss, *tape.gradient(loss, [w, x])]


def added(results):
    """Losses and gradients of weights are added, those of rows joined."""
    losses, of_weights, of_rows = zip(*results, strict=True)
    return sum(losses), sum(of_weights), np.concatenate(of_rows)


W = np.random.default_rng(2).normal(size=[4, 4])


def on_one_device(dtype=np.float64):
    return run_eagerly(loss_and_gradient, X.astype(dtype), W.astype(dtype))


@BOTH
@PARTS
@pytest.mark.parametrize("how", ["tape", "gradients"])
def test_towers_have_the_loss_and_gradients_of_one_device(run, sizes, how):
    def build(x, w):
        parts = tf.split(x, sizes)

        def tower_fn(tower, part):
            return loss_and_gradient(part, w, how)

        return map_towers(tower_fn, ours(len(sizes)), parts)

    for got, want in zip(added(run(build, X, W)), on_one_device(), strict=True):
        np.testing.assert_allclose(got, want, rtol=TINY, atol=TINY)


@BOTH
def test_a_gradient_of_a_gradient_is_that_of_one_device(run):
    def penalty(x, w):
        with tf.GradientTape() as outer:
            outer.watch(w)
            _, of_weights, _ = loss_and_gradient(x, w)
            # Of a sum over towers, so that it is one device's.
            penalty = tf.reduce_sum(tf.sin(sum_over_towers(of_weights)))
        return penalty, outer.gradient(penalty, w)

    def build(x, w):
        return map_towers(
            lambda _, part: penalty(part, w), ours(2), tf.split(x, [5, 7])
        )

    want, of_one = run_eagerly(penalty, X, W)
    (first, of_first), (second, of_second) = run(build, X, W)
    np.testing.assert_allclose([first, second], [want, want], rtol=TINY)
    # Each tower has the penalty of all: the sum of both is twice one device's.
    np.testing.assert_allclose(of_first + of_second, 2 * of_one, rtol=1e-10)


@BOTH
def test_losses_differentiated_after_the_towers_are_those_of_one_device(run):
    def build(x, w):
        def losses():
            parts = tf.split(x, [5, 7])
            return tf.add_n(map_towers(lambda _, p: model(p, w), ours(2), parts))

        if not traces_function():
            return tf.gradients(losses(), [w, x])
        with tf.GradientTape() as tape:
            tape.watch([w, x])
            loss = losses()
        return tape.gradient(loss, [w, x])

    for got, want in zip(run(build, X, W), on_one_device()[1:], strict=True):
        np.testing.assert_allclose(got, want, rtol=TINY, atol=TINY)


@BOTH
def test_moments_are_those_of_all_rows(run):
    rtols = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
    inputs = [tf.cast(X * 30, d).numpy().astype(np.float64) for d in rtols]

    def tower_fn(tower, *parts):
        moments = []
        for part, dtype in zip(parts, rtols, strict=True):
            moments.append(moments_over_towers(tf.cast(part, dtype), [0]))
            assert moments[-1][0].dtype == moments[-1][1].dtype == dtype
        return [[tf.cast(own, tf.float64) for own in pair] for pair in moments]

    def build(*inputs):
        parts = [tf.split(x, [5, 0, 7]) for x in inputs]
        nothing = [x[:0] for x in inputs]
        return [
            *map_towers(tower_fn, ours(3), *parts),
            map_towers(tower_fn, ours(2), *([own] * 2 for own in nothing))[1],
        ]

    *towers, none = run(build, *inputs)
    for tower in towers:
        for (mean, variance), x, rtol in zip(
            tower, inputs, rtols.values(), strict=True
        ):
            np.testing.assert_allclose(mean, x.mean(0), rtol=rtol)
            np.testing.assert_allclose(variance, x.var(0), rtol=rtol)
    np.testing.assert_array_equal(none, np.zeros([3, 2, 4]))  # of no row in any tower


@BOTH
def test_each_build_of_a_graph_has_its_own_sums_of_structures(run):
    def tower_fn(tower, x):
        both = sum_over_towers({"x": x, "rows": tf.shape(x)[:1]})
        return both["x"], both["rows"]

    def build(x):
        first = map_towers(tower_fn, ours(3), [x, 2 * x, 3 * x])
        totals = []
        with joined_towers(2) as joined:  # built by hand
            for k in range(2):
                with TrainTowerContext(f"own{k}", index=k, total=2), joined.tower(k):
                    totals.append(sum_over_towers((k + 1) * x))
        return first, map_towers(tower_fn, ours(1), [x]), totals

    first, second, by_hand = run(build, X)
    for results, times in (first, 6), (second, 1):
        for total, rows in results:
            np.testing.assert_allclose(total, times * X, rtol=TINY)
            np.testing.assert_array_equal(rows, [12 * len(results)])
    for total in by_hand:
        np.testing.assert_array_equal(total, 3 * X)


@BOTH
def test_towers_built_in_the_body_of_a_loop_are_one_device(run):
    def in_loop(towers_of):
        """Descends three times from W, with gradients that are added over towers."""

        def build(x, w):
            def body(i, w):
                grads = [grad for _, grad, _ in towers_of(x, w)]
                return i + 1, w - 0.01 * tf.add_n(grads)

            return tf.while_loop(lambda i, w: i < 3, body, (0, w))[1]

        return build

    def both(x, w):
        parts = tf.split(x, [5, 7])
        return map_towers(lambda _, part: loss_and_gradient(part, w), ours(2), parts)

    got = run(in_loop(both), X, W)
    want = run_in_function(in_loop(lambda x, w: [loss_and_gradient(x, w)]), X, W)
    np.testing.assert_allclose(got, want, rtol=1e-10)


def test_a_function_of_towers_is_saved_and_its_copy_has_gradients(tmp_path):
    module = tf.Module()

    @tf.function(input_signature=[tf.TensorSpec([12, 4], tf.float64)])
    def total(x):
        losses = map_towers(lambda _, x: model(x, W), ours(2), tf.split(x, [5, 7]))
        return tf.add_n(losses)

    module.total = total
    tf.saved_model.save(module, str(tmp_path))
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.saved_model.load(str(tmp_path)).total(x)
    want, _, gradient = on_one_device()
    np.testing.assert_allclose(loss, want, rtol=TINY)
    np.testing.assert_allclose(tape.gradient(loss, x), gradient, rtol=1e-10)


def test_outside_of_towers_a_tensor_stays_as_it_is(graph):
    x = tf.constant(X)
    assert sum_over_towers(x) is x
    with TrainTowerContext("only"):
        assert sum_over_towers(x) is x
    assert map_towers(lambda _: sum_over_towers(x), ours(1))[0] is x
    with synchronized_layers():
        assert tf.distribute.get_replica_context().num_replicas_in_sync == 1


def test_sums_and_their_gradients_are_made_on_the_first_towers_device(graph):
    def tower_fn(tower):
        x = tf.constant(1.0)
        loss = sum_over_towers(x) ** 2
        return v1.gradients(loss, x, colocate_gradients_with_ops=True)

    map_towers(tower_fn, ours(3))
    sums = [op for op in graph.get_operations() if op.type == "AddN"]
    assert [op.device for op in sums] == ["/device:CPU:0"] * 2
    for op in sums:
        assert op.colocation_groups() == [f"loc:@{op.name}".encode()]


def test_towers_on_one_device_compile_with_xla():
    one = towers(["/cpu:0", "/cpu:0"])

    @tf.function(jit_compile=True)
    def step(x, w):
        return map_towers(
            lambda _, part: loss_and_gradient(part, w), one, tf.split(x, [5, 7])
        )

    results = tf.nest.map_structure(np.array, step(X, W))
    for got, want in zip(added(results), on_one_device(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9)


# What is refused


def layers_of(names, width=4):
    def build(x):
        for name in names:
            with tf.name_scope(name):
                x = x - sum_over_towers(tf.reduce_sum(x[:, :width], 0, keepdims=True))
        return x

    return build


def build_different(*names):
    def build(x):
        def tower_fn(tower, x):
            return layers_of(names[tower.index])(x)

        return map_towers(tower_fn, ours(len(names)), [x] * len(names))

    return build


OTHER_LAYERS = [
    (["bn", "head"], r"tower0 has reached 'stem' .*tower1 'bn'"),
    (["stem"], r"tower1 has not reached \['bn'\] of tower0"),
    (["stem", "bn", "more"], r"tower0 has not reached \['more'\] of tower1"),
    (["bn", "stem"], r"tower0 has reached 'stem' .*tower1 'bn'"),
    ([], r"tower1 has not reached \['stem', 'bn'\] of tower0"),
]


@BOTH
def test_towers_with_other_layers_are_refused_by_name(run):
    for others, says in OTHER_LAYERS:
        with pytest.raises(ValueError, match=says):
            run(build_different(["stem", "bn"], others), X)
    with pytest.raises(ValueError, match=r"tower1 'bn_1'"):
        run(build_different(["bn", "bn_1"], ["bn_1", "bn"]), X)

    def tower_fn(tower, x):
        return sum_over_towers(x[0] if tower.index else x[1])

    for other in (lambda x: x[:, :3], lambda x: tf.cast(x, tf.int32)):
        with pytest.raises(ValueError, match=r"\(float64 \(12, 4\)\), tower1 "):
            run(lambda x, o=other: map_towers(tower_fn, ours(2), [(o(x), x)] * 2), X)


@BOTH
def test_layers_that_are_numbered_on_in_each_tower_are_the_same(run):
    first, second = run(build_different(["bn", "bn_1"], ["bn_2", "bn_3"]), X)
    np.testing.assert_array_equal(first, second)


@BOTH
def test_a_tower_that_is_not_differentiated_is_refused(run):
    def tower_fn(tower, x):
        with tf.name_scope("bn"):
            total = sum_over_towers(x)
        if tower.index == 1:
            return total
        return tf.gradients(total, x)[0]

    with pytest.raises(ValueError, match=r"tower1 has not reached \['bn \(gradient\)'"):
        run(lambda x: map_towers(tower_fn, ours(2), [x, x]), X)


def test_a_gradient_that_one_tower_alone_takes_later_fails_by_name():
    def build(x):
        parts = [x, 2 * x]
        totals = map_towers(lambda _, x: sum_over_towers(x), ours(2), parts)
        return tf.gradients(totals[0], parts[0])

    with pytest.raises(tf.errors.InvalidArgumentError, match="waits_for_all_towers"):
        run_in_graph(build, X)


@BOTH
def test_an_exception_in_a_tower_ends_the_build_and_leaves_no_tower(run):
    threads = threading.active_count()

    def tower_fn(tower, x):
        total = sum_over_towers(x)
        if tower.index == 1:
            raise KeyError("of tower 1")
        return total

    def build(x):
        with pytest.raises(KeyError, match="of tower 1"):
            map_towers(tower_fn, ours(3), [x, x, x])
        assert sum_over_towers(x) is x
        return map_towers(lambda _, x: sum_over_towers(x), ours(2), [x, x])

    for total in run(build, X):
        np.testing.assert_array_equal(total, 2 * X)
    assert threading.active_count() <= threads


def test_eager_towers_and_a_function_for_each_are_refused():
    says = r"Towers are built .*inside a tf.function"
    with pytest.raises(RuntimeError, match=says):
        map_towers(lambda _: sum_over_towers(tf.constant(1.0)), ours(2))
    with synchronized_layers(), pytest.raises(RuntimeError, match=says):
        map_towers(lambda _: 1, ours(2))
    each = tf.function(lambda x: sum_over_towers(x), autograph=False)
    with pytest.raises(RuntimeError, match=r"A tf.function for each tower"):
        map_towers(lambda _: each(1.0), ours(2))


@BOTH
@pytest.mark.parametrize("differentiates", [False, True])
def test_a_branch_of_a_tower_is_refused(run, differentiates):
    def tower_fn(tower, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = sum_over_towers(x) if differentiates else x

            def branch():
                if differentiates:
                    return tape.gradient(total, x)
                return sum_over_towers(x)

            return tf.cond(tf.reduce_sum(x) > 0, branch, lambda: x)

    with pytest.raises(RuntimeError, match=r"tf.cond.*tower0|tower0"):
        run(lambda x: map_towers(tower_fn, ours(2), [x, x]), X)


def test_a_branch_of_tensorflow_1_is_refused(graph):
    v1.disable_control_flow_v2()
    try:
        x = tf.constant(X)
        branch = lambda: sum_over_towers(x)  # noqa: E731
        with pytest.raises(RuntimeError, match="in a branch or loop of a tower"):
            map_towers(lambda _: v1.cond(tf.constant(True), branch, branch), ours(2))
    finally:
        v1.enable_control_flow_v2()


def test_a_tower_that_nothing_joins_is_refused(graph):
    with (
        Tower(1, "/cpu:0", 2).scope(),
        pytest.raises(RuntimeError, match="tower1 is built by neither map_towers nor"),
    ):
        sum_over_towers(tf.constant(1.0))
    with (
        TrainTowerContext("tower0", index=0, total=2),
        pytest.raises(RuntimeError, match="tower0 is built by neither"),
    ):
        sum_over_towers(tf.constant(1.0))


def test_effects_that_cannot_keep_their_order_are_refused():
    seen = tf.Variable(tf.zeros([4], tf.float64))

    def through_a_variable(tower, x):
        total = sum_over_towers(tf.reduce_sum(x, 0) + seen)
        seen.assign(total)
        return total

    def through_python(tower, x):
        same = tf.numpy_function(lambda x: x, [x], tf.float64)
        total = sum_over_towers(same)
        return tf.numpy_function(lambda x: x, [total], tf.float64)

    def in_order(tower, x):
        total = sum_over_towers(tf.reduce_sum(x, 0))
        seen.assign_add(total)
        return seen + total

    for tower_fn in (through_a_variable, through_python):
        with pytest.raises(ValueError, match="waits for a sum over towers that needs"):
            run_in_function(lambda x, fn=tower_fn: map_towers(fn, ours(2), [x, x]), X)
    total = 2 * X.sum(0)
    first, second = run_in_function(lambda x: map_towers(in_order, ours(2), [x, x]), X)
    np.testing.assert_allclose([first, second], [2 * total, 3 * total], rtol=TINY)


@pytest.mark.parametrize("num_towers", [1, 2])
def test_traced_sums_go_on_to_other_processes(num_towers):
    """Sums, also those of gradients, by name; of a process with one tower, too."""
    together, names = ours(num_towers), []

    def sum_ranks(name, sums):  # as of three processes with equal towers
        names.append(name)
        return [3 * own for own in sums]

    def sum_and_gradient(x):
        with tf.GradientTape() as tape, tf.name_scope("norm"):
            tape.watch(x)
            total = sum_over_towers(x)
            loss = 5 * total
        return total, tape.gradient(loss, x)

    @tf.function
    def run(xs):
        return call_towers_once(
            sum_and_gradient,
            [[x] for x in xs],
            [tower.scope for tower in together],
            num_ranks=3,
            sum_ranks=sum_ranks,
        )

    xs = [tf.constant(2.0 + k) for k in range(num_towers)]
    want = 3 * sum(2.0 + k for k in range(num_towers)), 5.0 * 3 * num_towers
    assert [tuple(map(float, own)) for own in run(xs)] == [want] * num_towers
    assert names == ["norm", "norm (gradient)"]
