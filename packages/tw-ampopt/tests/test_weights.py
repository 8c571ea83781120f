"""Towers and micro-batches with unlike numbers of rows train as one device on all."""

import numpy as np
import pytest
import tensorflow as tf

import tw_ampopt
from tw_ampopt import DynamicLossScale
from tw_core.testing import SparseRows

SGD = {"tf_optimizer": "tf.train.GradientDescentOptimizer", "learning_rate": 0.5}
ADAM = {"tf_optimizer": "tf.train.AdamOptimizer", "learning_rate": 0.5}
SIZES = (3, 20_000)  # on both sides of what is joined
INITIAL = [np.zeros(size, np.float32) for size in SIZES]
# [micro-batches][towers] rows, in all a power of two.
PARTITIONS = [
    [(4, 4)],
    [(8, 0, 0)],
    [(4,), (2,), (2,)],
    [(4, 2), (2, 0)],
    [(3, 5)],
    [(0, 0), (2, 4), (0, 2)],
    [(1, 2, 1), (4, 8, 0)],
]


def rows(partition):
    """[rows][N] multiples of 15, so that means of 3 and 5 are whole: each gradient."""
    random = np.random.default_rng(0)
    total = sum(map(sum, partition))
    wholes = [15 * random.integers(-8, 9, (total, size)) for size in SIZES]
    return [own.astype(np.float32) for own in wholes]


def feeds_of(partition):
    """[micro-batches][towers][N] means over rows, NaN where there are none."""
    own, at, feeds = rows(partition), 0, []
    for micro_batch in partition:
        towers = []
        for count in micro_batch:
            parts = [column[at : at + count] for column in own]
            empty = [np.full(size, np.nan, np.float32) for size in SIZES]
            towers.append([p.mean(axis=0) for p in parts] if count else empty)
            at += count
        feeds.append(towers)
    return feeds


def train(make_trainer, partition, *, updates=2, weigh=True, **arguments):
    steps = len(partition) if len(partition) > 1 else None
    trainer = make_trainer(
        INITIAL,
        len(partition[0]),
        accumulation_steps=steps,
        weighs=weigh,
        **arguments,
    )
    for _ in range(updates):
        for counts, feeds in zip(partition, feeds_of(partition), strict=True):
            trainer.step(*feeds, weights=counts if weigh else None)
    return trainer


def assert_same_bits(got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
@pytest.mark.parametrize("options", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize(
    "scale", [None, DynamicLossScale(6, 1_000)], ids=["plain", "scaled"]
)
def test_any_partition_trains_as_one_device_does(
    make_trainer, partition, options, scale
):
    """Neither does a NaN of a tower without rows count as an overflow."""
    total = sum(map(sum, partition))
    one = train(make_trainer, [(total,)], weigh=False, loss_scale=scale, **options)
    got = train(make_trainer, partition, loss_scale=scale, **options)
    for own in got.values():
        assert_same_bits(own, one.values()[0])
    assert got.statistics()["updates"] == 2
    assert got.statistics()["skipped_updates"] == 0
    assert got.statistics().get("loss_scaling_log2", 6) == 6


@pytest.mark.parametrize(("steps", "weight"), [(None, 0.1), (2, 3), (2, 7)])
def test_equal_weights_change_no_bit_of_any_gradient(steps, weight):
    random = np.random.default_rng(0)
    lists = [[tf.Variable(v) for v in INITIAL] for _ in range(6)]
    weighed, plain = [
        tw_ampopt.TowerOptimizer(own, accumulation_steps=steps, **ADAM)
        for own in (lists[:3], lists[3:])
    ]
    for _ in range(4):
        grads = [
            [random.normal(size=size).astype(np.float32) for size in SIZES]
            for _ in range(3)
        ]
        weighed.apply(grads, weights=[weight] * 3)
        plain.apply(grads)
    for own, other in zip(lists[:3], lists[3:], strict=True):
        assert_same_bits(own, other)


def test_what_is_dropped_does_not_weigh(make_trainer):
    trainer = make_trainer(
        INITIAL,
        2,
        accumulation_steps=3,
        on_nonfinite="drop_micro_batch",
        loss_scale=DynamicLossScale(),
        weighs=True,
        **SGD,
    )
    bad = [np.full(size, np.inf, np.float32) for size in SIZES]
    grads = [[np.full(size, v, np.float32) for size in SIZES] for v in (4, 8, 12)]
    trainer.step(grads[0], bad, weights=[64, 64])
    trainer.step(grads[0], grads[1], weights=[2, 1])
    trainer.step(grads[2], bad, weights=[1, 0])
    want = [np.full(size, -0.5 * 7, np.float32) for size in SIZES]
    assert_same_bits(trainer.values()[0], want)
    statistics = trainer.statistics()
    assert statistics["micro_batches_dropped"] == 1
    assert statistics["loss_scaling_log2"] == 14, "a dropped micro-batch is an overflow"


@pytest.mark.parametrize("steps", [None, 2])
def test_nobody_with_weight_gives_means_of_zero(make_trainer, steps):
    trainer = make_trainer(INITIAL, 2, accumulation_steps=steps, weighs=True, **SGD)
    bad = [np.full(size, np.nan, np.float32) for size in SIZES]
    for _ in range(steps or 1):
        trainer.step(bad, bad, weights=[0, 0])
    assert_same_bits(trainer.values()[0], INITIAL)
    assert trainer.statistics()["updates"] == 1


def test_sparse_gradients_are_weighed(make_trainer):
    initial = [np.zeros((4, 2), np.float32)]
    feeds = [
        SparseRows(np.full((2, 2), value, np.float32), np.array([1, row]))
        for value, row in ((4.0, 1), (8.0, 3))
    ]
    for steps in (None, 1):
        trainer = make_trainer(
            initial,
            2,
            feeds_like=feeds[:1],
            accumulation_steps=None if steps is None else (lambda: tf.constant(1)),
            weighs=True,
            **SGD,
        )
        trainer.step(feeds[:1], feeds[1:], weights=[6, 2])
        want = np.zeros((4, 2), np.float32)
        want[1], want[3] = -0.5 * (6 * 8 + 2 * 8) / 8, -0.5 * 2 * 8 / 8
        np.testing.assert_array_equal(trainer.values()[0][0], want)


def test_a_reset_forgets_weights(make_trainer):
    trainer = make_trainer(INITIAL, 1, accumulation_steps=2, weighs=True, **SGD)
    ones = [np.ones(size, np.float32) for size in SIZES]
    trainer.step(ones, weights=[5])
    trainer.reset()
    trainer.step(ones, weights=[1])
    trainer.step(ones, weights=[3])
    assert_same_bits(trainer.values()[0], [np.full(s, -0.5, np.float32) for s in SIZES])


def own_optimizer(**arguments):
    variable = tf.Variable([0.0])
    optimizer = tw_ampopt.TowerOptimizer([variable], **SGD, **arguments)
    return variable, optimizer


def test_micro_batches_without_weights_weigh_one():
    variable, optimizer = own_optimizer(accumulation_steps=3)
    optimizer.apply([tf.constant([4.0])], weights=[2])
    optimizer.apply([tf.constant([8.0])])
    optimizer.apply([tf.constant([16.0])], weights=[1])
    np.testing.assert_array_equal(variable, [-0.5 * (8 + 8 + 16) / 4])


def test_a_checkpoint_without_weights_restores_in_the_middle_of_a_group(tmp_path):
    """As the version before had it: what it lacks keeps its value, which is 0."""
    variable, optimizer = own_optimizer(accumulation_steps=2)
    optimizer.apply([tf.constant([4.0])])
    [*older, excess, unit] = optimizer._saved["own"]
    assert excess.name.startswith("Train/grad_acc_weight")
    assert unit.name.startswith("Train/grad_acc_weight_unit")
    saved = {**optimizer._saved, "own": older}
    old = tf.train.Checkpoint(model=variable, optimizer=Holder(saved))
    path = old.save(str(tmp_path / "old"))

    variable, optimizer = own_optimizer(accumulation_steps=2)
    new = tf.train.Checkpoint(model=variable, optimizer=optimizer)
    status = new.restore(path)
    with pytest.raises(AssertionError, match="grad_acc_weight"):
        status.assert_existing_objects_matched()
    optimizer.apply([tf.constant([8.0])], weights=[3])
    np.testing.assert_array_equal(variable, [-0.5 * (4 + 3 * 8) / 4])


@pytest.mark.parametrize("steps", [None, 2])
def test_weights_are_compiled_with_xla(steps):
    variable, optimizer = own_optimizer(accumulation_steps=steps)
    apply = tf.function(
        lambda grad, rows: optimizer.apply([grad], weights=[rows]), jit_compile=True
    )
    if steps:
        apply(tf.constant([np.nan]), tf.constant(0))
    apply(tf.constant([4.0]), tf.constant(3))
    np.testing.assert_array_equal(variable, [-2.0])


class Holder(tf.Module):
    def __init__(self, saved):
        super().__init__()
        self._saved = saved


def test_a_graph_without_weights_saves_what_it_saved_before(make_trainer):
    if make_trainer.mode == "function":
        pytest.skip("makes all state when it is made")
    names = {
        weigh: {
            v.name
            for v in make_trainer(
                INITIAL, 2, accumulation_steps=2, weighs=weigh, **SGD
            ).optimizer.variables()
        }
        for weigh in (False, True)
    }
    more = {"Train/grad_acc_weight:0", "Train/grad_acc_weight_unit:0"}
    assert names[True] - names[False] == more


@pytest.mark.parametrize("weights", [(6, 2), (0, 4)])
def test_calls_on_one_device_are_weighed(weights):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        with tf.device("/cpu:0"):
            both, first = [tf.Variable([0.0]) for _ in range(2)]
            losses = [v[0] for v in (4.0 * both + 2.0 * first, 8.0 * both)]
        optimizer = tw_ampopt.Optimizer(**SGD)
        for loss, weight in zip(losses, weights, strict=True):
            optimizer.register_gradients(loss, [both, first], weight=weight)
        train_op = optimizer.apply_updates()
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(train_op)
        want = np.average([4.0, 8.0], weights=weights)
        np.testing.assert_array_equal(session.run(both), [np.float32(-0.5 * want)])
        want = np.average([2.0, 0.0], weights=weights)
        np.testing.assert_array_equal(session.run(first), [np.float32(-0.5 * want)])


def test_bad_weights_are_refused():
    _, optimizer = own_optimizer()
    for weights in ([1, 1], [-1], [None], 2, [True]):
        with pytest.raises((TypeError, ValueError), match=r"^weights must"):
            optimizer.apply([tf.constant([1.0])], weights=weights)
    eager = tf.constant(1)
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        variable = tf.Variable([0.0])
        for weights, says in [
            *(([weight], r"^weight must") for weight in (-1, "1", True, [1])),
            ([eager], "got a weight of another graph"),
            ([None, 1], "got one after none"),
            ([1, None], "got none after some"),
        ]:
            optimizer = tw_ampopt.Optimizer(**SGD)
            with pytest.raises((TypeError, ValueError), match=says):
                for weight in weights:
                    optimizer.register_gradients(variable[0], [variable], weight=weight)
