"""Losses over the rows of all towers have the value and gradients of one device.

The oracle is one device that takes the rows of all towers, in float64.
"""

import numpy as np
import pytest
import tensorflow as tf

from tw_core import map_towers, towers
from tw_core.internal import call_towers_once
from tw_core.synchronized import gather, sum_over_towers, synchronized_layers
from tw_core.testing import CPUS, run_eagerly, run_in_function, run_in_graph

v1 = tf.compat.v1
BOTH = pytest.mark.parametrize("run", [run_in_graph, run_in_function])
TRACES = pytest.mark.parametrize("trace", ["once", "each"])
TINY = 1e-12  # float64, sums of other orders
X = np.random.default_rng(1).normal(3.0, 2.0, [12, 4])
W = np.random.default_rng(2).normal(size=[4, 4])
LABELS = np.arange(12, dtype=np.int64) % 3
SIZES = {
    "even": [6, 6],
    "uneven": [7, 4, 1],
    "one empty": [5, 0, 7],
    "the first empty": [0, 12],
    "four uneven": [1, 5, 2, 4],
    "one tower": [12],
}
PARTS = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def ours(total):
    return towers(list(CPUS[:total]))


def contrastive(z, labels):
    """A supervised contrastive loss, and a term of the batch's covariance."""
    z = tf.nn.l2_normalize(z, 1)
    count = tf.shape(z)[0]
    similar = tf.matmul(z, z, transpose_b=True) / 0.5
    similar -= 1e9 * tf.eye(count, dtype=z.dtype)
    same = tf.cast(tf.equal(labels[:, None], labels[None]), z.dtype)
    same -= tf.eye(count, dtype=z.dtype)
    logs = similar - tf.reduce_logsumexp(similar, 1, keepdims=True)
    pairs = -tf.reduce_sum(same * logs, 1) / tf.reduce_sum(same, 1)
    centred = z - tf.reduce_mean(z, 0)
    return tf.reduce_mean(pairs) + tf.reduce_sum(tf.matmul(centred, z, True) ** 2)


def loss_of(x, labels, w, whole=gather):
    """Rows pass a gather twice: of embeddings, and of what depends on all of them."""
    z = whole(tf.nn.softplus(x @ w))
    own = x @ w - tf.reduce_mean(z**2, 0)
    own, labels = whole((own, labels))
    return contrastive(own, labels)


def loss_and_gradients(x, labels, w, how="tape", whole=gather):
    if how == "gradients":
        loss = loss_of(x, labels, w, whole)
        return [loss, *tf.gradients(loss, [w, x])]
    with tf.GradientTape() as tape:
        tape.watch([w, x])
        loss = loss_of(x, labels, w, whole)
    return [loss, *tape.gradient(loss, [w, x])]


def averaged(results):
    """Losses, which are equal, and gradients of weights; those of rows are joined."""
    losses, of_weights, of_rows = zip(*results, strict=True)
    count = len(results)
    return losses[-1], sum(of_weights) / count, np.concatenate(of_rows) / count


def on_one_device():
    return run_eagerly(
        lambda *given: loss_and_gradients(*given, whole=lambda own: own), X, LABELS, W
    )


def build_towers(sizes, how="tape", **options):
    def build(x, labels, w):
        return map_towers(
            lambda _, x, labels: loss_and_gradients(x, labels, w, how),
            ours(len(sizes)),
            tf.split(x, sizes),
            tf.split(labels, sizes),
            **options,
        )

    return build


@BOTH
@PARTS
@pytest.mark.parametrize("how", ["tape", "gradients"])
def test_a_loss_over_all_rows_is_that_of_one_device(run, sizes, how):
    results = run(build_towers(sizes, how), X, LABELS, W)
    for got, want in zip(averaged(results), on_one_device(), strict=True):
        np.testing.assert_allclose(got, want, rtol=TINY, atol=TINY)


@pytest.mark.slow(
    by_day=["None-None-even-once", "None-None-four uneven-once", "12-True-uneven-each"]
)
@TRACES
@PARTS
@pytest.mark.parametrize("jit_compile", [None, True])
@pytest.mark.parametrize("rows", [None, 12])
def test_every_kind_of_trace_is_one_device(trace, sizes, jit_compile, rows):
    one = towers(["/cpu:0"] * len(sizes))  # XLA compiles for a single device
    specs = [
        tf.TensorSpec([rows, 4], tf.float64),
        tf.TensorSpec([rows], tf.int64),
        tf.TensorSpec([4, 4], tf.float64),
    ]

    @tf.function(input_signature=specs, jit_compile=jit_compile)
    def step(x, labels, w):
        return map_towers(
            lambda _, x, labels: loss_and_gradients(x, labels, w),
            one,
            tf.split(x, sizes),
            tf.split(labels, sizes),
            trace=trace,
        )

    results = tf.nest.map_structure(np.array, step(X, LABELS, W))
    for got, want in zip(averaged(results), on_one_device(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


@BOTH
def test_each_tower_may_have_the_loss_of_its_own_rows(run):
    """As InfoNCE: own rows beside those of all; losses are summed."""

    def loss_of_rows(own, z):
        logits = tf.matmul(own, z, transpose_b=True)
        return tf.reduce_sum(tf.reduce_logsumexp(logits, 1)) / 12

    def alone(x, w):
        return [tf.gradients(loss_of_rows(x @ w, x @ w), w)[0]]

    def build(x, w):
        def tower_fn(_, part):
            own = part @ w
            return tf.gradients(loss_of_rows(own, gather(own)), w)[0]

        return map_towers(tower_fn, ours(3), tf.split(x, [7, 4, 1]))

    [want] = run(alone, X, W)
    np.testing.assert_allclose(sum(run(build, X, W)), want, rtol=TINY)


@BOTH
def test_a_gradient_of_a_gradient_is_that_of_one_device(run):
    def taped(x, w, whole, total):
        with tf.GradientTape() as outer:
            outer.watch(w)
            with tf.GradientTape() as tape:
                tape.watch(w)
                loss = tf.reduce_sum(tf.sin(whole(x @ w)) ** 3)
            penalty = tf.reduce_sum(tf.sin(total(tape.gradient(loss, w))))
        return penalty, outer.gradient(penalty, w)

    def build(x, w):
        mean = lambda own: sum_over_towers(own) / 2  # noqa: E731
        return map_towers(
            lambda _, x: taped(x, w, gather, mean), ours(2), tf.split(x, [5, 7])
        )

    same = lambda own: own  # noqa: E731
    want, of_one = run_eagerly(lambda x, w: taped(x, w, same, same), X, W)
    (first, of_first), (second, of_second) = run(build, X, W)
    np.testing.assert_allclose([first, second], [want, want], rtol=TINY)
    # Each tower has the penalty of all: the sum of both is twice one device's.
    np.testing.assert_allclose(of_first + of_second, 2 * of_one, rtol=1e-10)


@BOTH
def test_rows_of_any_dtype_and_rank_are_in_the_towers_order(run):
    kinds = [
        tf.cast(X[:, None] > 3, tf.bool),
        tf.cast(X, tf.float16),
        tf.cast(X, tf.bfloat16),
        tf.cast(X, tf.complex64),
        tf.strings.as_string(LABELS),
    ]
    kinds = [own.numpy() for own in kinds]

    def build(*given):
        parts = zip(*(tf.split(own, [5, 0, 7]) for own in given), strict=True)
        return map_towers(lambda _, own: gather(list(own)), ours(3), list(parts))

    for tower in run(build, *kinds):
        for got, want in zip(tower, kinds, strict=True):
            np.testing.assert_array_equal(got, want)


@BOTH
def test_a_gradient_of_chosen_rows_is_that_of_one_device(run):
    """That of a lookup in the rows is sparse."""
    chosen = [3, 11, 3, 0]

    def loss(z):
        return tf.reduce_sum(tf.gather(z, chosen) ** 3)

    def build(x):
        def tower_fn(_, x):
            return tf.gradients(loss(gather(x)), x)[0]

        return map_towers(tower_fn, ours(3), tf.split(x, [7, 4, 1]))

    [want] = run(lambda x: [tf.convert_to_tensor(tf.gradients(loss(x), x)[0])], X)
    np.testing.assert_allclose(np.concatenate(run(build, X)) / 3, want, rtol=TINY)


@BOTH
def test_the_gather_of_tensorflows_replicas_joins_towers(run):
    def tower_fn(_, x):
        context = tf.distribute.get_replica_context()
        columns = context.all_gather(tf.transpose(x), axis=-1)
        return context.all_gather({"x": x}, 0)["x"], columns

    def build(x):
        with synchronized_layers():
            return map_towers(tower_fn, ours(3), tf.split(x, [5, 0, 7]))

    for rows, columns in run(build, X):
        np.testing.assert_array_equal(rows, X)
        np.testing.assert_array_equal(columns, X.T)


def test_padding_is_not_among_the_rows_and_does_not_reach_gradients():
    """Towers 1 and 3 have a row of NaN that does not count."""
    rows = [X[:7], X[:1] * np.nan, X[7:], X[:1] * np.nan]
    counted = [True, False, True, False]

    def of_rows(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            z = gather(x)
            loss = tf.reduce_sum(tf.matmul(z, z, True) ** 3)
        return loss, tape.gradient(loss, x), z

    @tf.function
    def step(parts):
        return call_towers_once(
            of_rows,
            [[part] for part in parts],
            [tower.scope for tower in ours(4)],
            counted=[tf.constant(own) for own in counted],
        )

    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(tf.matmul(x, x, True) ** 3)
    results = step([tf.constant(own) for own in rows])
    for got, _, z in results:
        np.testing.assert_array_equal(z, X)
        np.testing.assert_allclose(got, loss, rtol=TINY)
    # Towers that do not count have the loss, but nobody adds its gradients.
    found = np.concatenate([results[0][1], results[2][1]]) / 2
    np.testing.assert_allclose(found, tape.gradient(loss, x), rtol=TINY)


# Over the ranks of a group


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_of_ranks_are_joined_in_their_order(rank):
    """Rank 0 has towers of 3 and 2 rows, rank 1 of 1 and 4; sums come in any order."""
    sizes, names = [[3, 2], [1, 4]], []
    of_rank = [X[:5], X[5:10]]
    numbers = np.repeat([0, 1, 2, 3], [3, 2, 1, 4])

    def sum_ranks(name, sums):
        names.append(name)
        (own,) = sums
        if "gradient" in name:  # of the whole batch, as each rank's is
            places = tf.concat([own.indices] * 2, 0)
            return [tf.IndexedSlices(tf.concat([own.values] * 2, 0), places)]
        shuffled = tf.constant([5, 6, 7, 8, 9, 0, 1, 2, 3, 4])
        return [
            tf.IndexedSlices(
                tf.gather(tf.constant(X[:10]), shuffled), tf.gather(numbers, shuffled)
            )
        ]

    def rows_and_gradient(x):
        with tf.GradientTape() as tape, tf.name_scope("pairs"):
            tape.watch(x)
            z = gather(x)
            loss = tf.reduce_sum(tf.matmul(z, z, True) ** 3)
        return z, tape.gradient(loss, x)

    def run(x):
        return call_towers_once(
            rows_and_gradient,
            [[part] for part in tf.split(x, sizes[rank])],
            [tower.scope for tower in ours(2)],
            rank=rank,
            num_ranks=2,
            sum_ranks=sum_ranks,
        )

    whole = tf.constant(X[:10])
    with tf.GradientTape() as tape:
        tape.watch(whole)
        loss = tf.reduce_sum(tf.matmul(whole, whole, True) ** 3)
    want = tape.gradient(loss, whole)[5 * rank : 5 * rank + 5]
    results = run_in_function(run, of_rank[rank])
    for z, _ in results:
        np.testing.assert_array_equal(z, X[:10])
    found = np.concatenate([own for _, own in results]) / 4
    np.testing.assert_allclose(found, want, rtol=TINY)
    assert names == ["pairs", "pairs (gradient)"]


# What is refused


@BOTH
def test_towers_that_gather_other_rows_are_refused_by_name(run):
    def build(first, second):
        def tower_fn(tower, x):
            with tf.name_scope("pairs"):
                return (second if tower.index else first)(x)

        return lambda x: map_towers(tower_fn, ours(2), [x, x])

    narrow = lambda x: gather(x[:, :3])  # noqa: E731
    for first, second in (gather, sum_over_towers), (gather, narrow):
        said = r"^gather: .* tower0 has reached 'pairs' .*tower1"
        with pytest.raises(ValueError, match=said):
            run(build(first, second), X)
    said = r"^gather: .* tower1 has not reached \['pairs'\]"
    with pytest.raises(ValueError, match=said):
        run(build(gather, lambda x: x), X)
    with pytest.raises(ValueError, match=r"rows of tensors .* got \(\)"):
        run(lambda x: map_towers(lambda _: gather(x[0, 0]), ours(2)), X)


def test_outside_of_towers_a_tensor_stays_as_it_is():
    x = tf.constant(X)
    assert gather(x) is x
    with pytest.raises(RuntimeError, match=r"Towers are built .*inside a tf.function"):
        map_towers(lambda _: gather(x), ours(2))
