"""One update, in both modes, against NumPy, one big batch, and the plain optimizer."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tw_ampopt import DynamicLossScale, GradualLossScale, StaticLossScale
from tw_core.testing import SparseRows

SGD = {"tf_optimizer": "tf.train.GradientDescentOptimizer", "learning_rate": 0.5}
ADAM = {"tf_optimizer": "tf.train.AdamOptimizer", "learning_rate": 0.5}
KERAS_ADAM = {"tf_optimizer": "keras.optimizers.Adam", "learning_rate": 0.5}
# Two small variables, one above what reducers pack (4,096 elements), and one above
# what buffers pack (16,384).
INITIAL = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.ones(4, np.float32),
    np.ones((3, 2000), np.float32),
    np.ones((129, 130), np.float32),
]
LARGE = [np.ones((130, 130), np.float32), np.ones(3, np.float32)]


def whole(shape, seed, low=-8, high=9):
    """Whole numbers as floats: their sums are exact in any order."""
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.float32)


def feeds_like(initial, seed):
    return [whole(v.shape, [seed, n]) for n, v in enumerate(initial)]


def assert_same_bits(got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


@pytest.mark.parametrize(
    ("initial", "num_towers", "micro_batches"),
    [(INITIAL, 1, 8), (LARGE, 1, 4), (INITIAL, 4, None), (INITIAL, 2, 2)],
    ids=["packed-8", "large-4", "towers-4", "both-4"],
)
def test_parts_of_a_batch_equal_it_bit_for_bit(
    make_trainer, initial, num_towers, micro_batches
):
    arguments = {"loss_scale": DynamicLossScale(), **ADAM}
    whole_batch = make_trainer(initial, **arguments)
    parts = make_trainer(
        initial, num_towers, accumulation_steps=micro_batches, **arguments
    )
    count = num_towers * (micro_batches or 1)
    for group in range(3):
        feeds = [feeds_like(initial, 10 * group + m) for m in range(count)]
        for first in range(0, count, num_towers):
            parts.step(*feeds[first : first + num_towers])
        means = [sum(column) / count for column in zip(*feeds, strict=True)]
        whole_batch.step([mean.astype(np.float32) for mean in means])
        for tower in parts.values():
            assert_same_bits(tower, whole_batch.values()[0])


@pytest.mark.parametrize(
    "rule", [GradualLossScale(), DynamicLossScale(growth_interval=5)], ids=str
)
def test_after_many_bad_steps_good_ones_train_again(make_trainer, rule):
    trainer = make_trainer([np.zeros(2, np.float32)], loss_scale=rule, **ADAM)
    good, bad = [np.ones(2, np.float32)], [np.float32([np.nan, 1])]
    trainer.step(good)
    before = trainer.values()[0]
    for _ in range(200):
        trainer.step(bad)
    assert_same_bits(trainer.values()[0], before)
    assert trainer.statistics()["loss_scaling_log2"] == rule.lowest
    for _ in range(5):
        trainer.step(good)
    assert trainer.statistics()["updates"] == 6
    assert trainer.statistics()["loss_scaling_log2"] > rule.lowest
    np.testing.assert_allclose(trainer.values()[0][0], [-3, -3], rtol=1e-5)


def test_a_large_gradient_whose_square_overflows_is_no_overflow(make_trainer):
    trainer = make_trainer([np.zeros(2, np.float32)], clip_by_global_norm=1.0, **SGD)
    trainer.step([np.float32([3e30, 4e30])])
    np.testing.assert_allclose(trainer.values()[0][0], [-0.3, -0.4], rtol=1e-5)
    np.testing.assert_allclose(trainer.statistics()["global_norm"], 5e30, rtol=1e-5)
    assert trainer.statistics()["skipped_updates"] == 0


@pytest.mark.parametrize("drops", [False, True], ids=["skips", "drops"])
def test_any_run_of_good_and_bad_micro_batches_meets_the_oracle(make_trainer, drops):
    # Two in one buffer, and one in another.
    initial = [np.zeros(size, np.float32) for size in (3, 4_100, 16_400)]
    trainers = {
        size: make_trainer(
            initial,
            accumulation_steps=size,
            on_nonfinite="drop_micro_batch" if drops else "skip_group",
            **SGD,
        )
        for size in (1, 2, 3)
    }

    @settings(max_examples=25)
    @given(st.lists(st.booleans(), min_size=1, max_size=12), st.sampled_from([1, 2, 3]))
    def check(goods, size):
        check_against_oracle(trainers[size], goods, size, drops=drops and size > 1)

    check()


def check_against_oracle(trainer, goods, size, *, drops):
    trainer.reset()
    value = np.concatenate(trainer.values()[0])
    group, skipped, dropped = [], 0, 0
    for m, good in enumerate(goods):
        grad = whole(value.size, m)
        if not good:
            grad[m * 1_999 % value.size] = np.nan
            dropped += drops
        trainer.step(np.split(grad, [3, 4_103]))
        group.append(grad)
        if len(group) == size:
            kept = [g for g in group if np.isfinite(g).all()]
            if len(kept) == size or (drops and kept):
                mean = sum(kept) / np.float32(len(kept))
                value = value - np.float32(0.5) * mean
            else:
                skipped += 1
            group = []
        np.testing.assert_array_equal(np.concatenate(trainer.values()[0]), value)
    statistics = trainer.statistics()
    assert statistics["skipped_updates"] == skipped
    if drops:
        assert statistics["micro_batches_dropped"] == dropped
    assert getattr(trainer, "traces", 1) == 1


@pytest.mark.parametrize("num_towers", [1, 2])
def test_a_number_of_steps_that_changes_ends_a_group_as_its_class_says(
    make_trainer, num_towers
):
    """As StyleGAN2's, ``Optimizer`` divides and ends a group by the number it reads.

    A ``TowerOptimizer`` counts from the next update on, and keeps the mean.
    """
    box = []

    def multiplier():
        box.append(tf.Variable(2.0, trainable=False))
        return box[0]

    trainer = make_trainer(
        INITIAL,
        num_towers,
        accumulation_steps=multiplier,
        loss_scale=GradualLossScale(10.0, 0.25, 1.0),
        **SGD,
    )

    def set_to(value):
        if trainer.mode == "graph":
            with trainer.graph.as_default():
                trainer.session.run(box[0].assign(value))
        else:
            box[0].assign(value)

    numbers = (2, 3, 3, 4, 2, 1)
    groups = {
        "graph": [((0, 1, 2), (2, 3, 3)), ((3, 4), (4, 2)), ((5,), (1,))],
        "function": [((0, 1), (2, 2)), ((2, 3, 4), (3, 3, 3)), ((5,), (1,))],
    }[trainer.mode]
    want = [value.copy() for value in INITIAL]
    for group, divisors in groups:
        for s, divisor in zip(group, divisors, strict=True):
            before = int(trainer.statistics()["updates"])
            set_to(numbers[s])
            feeds = [feeds_like(INITIAL, 10 * s + k) for k in range(num_towers)]
            trainer.step(*feeds)
            for own, column in zip(want, zip(*feeds, strict=True), strict=True):
                own -= 0.5 * sum(column) / num_towers / divisor
            assert trainer.statistics()["updates"] == before + (s == group[-1])
        for tower in trainer.values():
            for got, own in zip(tower, want, strict=True):
                np.testing.assert_allclose(got, own, rtol=1e-5, atol=1e-5)
    for bad in (2.5, 0):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="a whole number of 1 or more"
        ):
            set_to(bad)
            trainer.step(*feeds)


@pytest.mark.parametrize("multiplier", [None, 2])
def test_a_missing_gradient_counts_as_zero(make_trainer, multiplier):
    like = [INITIAL[0], None, INITIAL[2], None]
    trainer = make_trainer(
        INITIAL, feeds_like=like, accumulation_steps=multiplier, **SGD
    )
    for _ in range(multiplier or 1):
        trainer.step([None if v is None else np.ones_like(v) for v in like])
    want = [v - np.float32(0.5 * (n in (0, 2))) for n, v in enumerate(INITIAL)]
    assert_same_bits(trainer.values()[0], want)


@pytest.mark.parametrize(
    ("rows", "multiplier", "num_towers", "options"),
    [
        *((6, 2, 2, SGD), (20_000, None, 2, KERAS_ADAM)),
        *((20_000, 2, 1, SGD), (6, None, 1, KERAS_ADAM)),
    ],
)
def test_sparse_gradients_give_what_dense_ones_do(
    make_trainer, rows, multiplier, num_towers, options
):
    """Keras's optimizers would take the last of several rows of one index."""
    initial = [whole((rows, 2), 0), np.ones(3, np.float32)]
    arguments = {
        "accumulation_steps": multiplier,
        "loss_scale": DynamicLossScale(),
        "clip_by_global_norm": 4.0,
        **options,
    }
    sparse = [
        SparseRows(whole((3, 2), [7, k]), np.array([1, 4, 1]), np.array([rows, 2]))
        for k in range(num_towers)
    ]
    like = [SparseRows(sparse[0].values, sparse[0].indices), initial[1]]
    with_rows = make_trainer(initial, num_towers, feeds_like=like, **arguments)
    dense = make_trainer(initial, num_towers, **arguments)
    for step in range(2 * (multiplier or 1)):
        rest = whole(3, step)
        with_rows.step(*([rows_of_tower, rest] for rows_of_tower in sparse))
        dense.step(*([rows_of_tower.to_dense(), rest] for rows_of_tower in sparse))
    for got, want in zip(with_rows.values(), dense.values(), strict=True):
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(
        with_rows.statistics()["global_norm"],
        dense.statistics()["global_norm"],
        rtol=1e-6,
    )


def test_a_sparse_gradient_reaches_the_optimizer_sparse(make_trainer):
    # Momentum of rows that a sparse gradient does not name stays as it is.
    initial = [np.ones((4, 1), np.float32)]
    like = [SparseRows(np.ones((1, 1), np.float32), np.array([0]))]
    trainer = make_trainer(
        initial,
        feeds_like=like,
        tf_optimizer="tf.train.MomentumOptimizer",
        momentum=0.5,
        learning_rate=1.0,
    )
    for row in (0, 1, 1):
        trainer.step([SparseRows(np.ones((1, 1), np.float32), np.array([row]))])
    momentum = trainer.slot(0, 0, "momentum")
    np.testing.assert_array_equal(momentum[:, 0], [1.0, 1.5, 0.0, 0.0])


def test_a_sparse_gradient_that_is_not_finite_skips(make_trainer):
    initial = [np.ones((20_000, 1), np.float32)]
    like = [SparseRows(np.ones((2, 1), np.float32), np.array([0, 1]))]
    trainer = make_trainer(initial, feeds_like=like, **SGD)
    trainer.step([SparseRows(np.float32([[1], [np.inf]]), np.array([0, 3]))])
    assert_same_bits(trainer.values()[0], initial)


def test_clipping_is_by_the_norm_after_unscaling(make_trainer):
    initial = [np.zeros(2, np.float32), np.zeros((1, 2), np.float32)]
    trainer = make_trainer(
        initial,
        2,
        loss_scale=StaticLossScale(20),
        clip_by_global_norm=1.0,
        accumulation_steps=2,
        **SGD,
    )
    feeds = [np.float32([2, 0]), np.float32([[0, 2]])]
    feeds_2 = [np.float32([4, 0]), np.float32([[0, 6]])]
    for _ in range(2):
        trainer.step(feeds, feeds_2)
    # The mean is [3, 0], [0, 4]; its norm is 5.
    for tower in trainer.values():
        np.testing.assert_allclose(tower[0], [-0.3, 0], rtol=1e-6)
        np.testing.assert_allclose(tower[1], [[0, -0.4]], rtol=1e-6)
    assert trainer.statistics()["global_norm"] == 5


def test_a_scale_or_a_norm_within_the_bound_changes_no_bit(make_trainer):
    for options in ({"loss_scale": StaticLossScale(20)}, {"clip_by_global_norm": 1e6}):
        plain = make_trainer(INITIAL, **ADAM)
        trainer = make_trainer(INITIAL, **options, **ADAM)
        rng = np.random.default_rng(3)
        for _ in range(4):
            feeds = [rng.standard_normal(v.shape).astype(np.float32) for v in INITIAL]
            trainer.step(feeds)
            plain.step(feeds)
        assert_same_bits(trainer.values()[0], plain.values()[0])


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_variables_accumulate_in_float32(make_trainer, kind):
    dtype = tf.as_dtype(kind).as_numpy_dtype
    trainer = make_trainer([np.zeros(1, dtype)], accumulation_steps=64, **SGD)
    # In half precision, a sum of 1024 and sixty-three ones loses every one of them.
    # The gradient of a half variable comes in half: 1/16 is exact there.
    trainer.step([np.float32([1024.0])])
    for _ in range(63):
        trainer.step([np.float32([1 / 16])])
    want = -0.5 * (1024 + 63 / 16) / 64
    np.testing.assert_array_equal(
        np.float32(trainer.values()[0][0]), np.float32(np.array([want]).astype(dtype))
    )


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("num_towers", [1, 2])
def test_master_copies_keep_updates_that_half_variables_lose(
    make_trainer, kind, num_towers
):
    dtype = tf.as_dtype(kind).as_numpy_dtype
    initial = [np.ones(3, dtype), np.ones(2, np.float32)]
    feeds = [np.ones(3, np.float32), np.ones(2, np.float32)]
    arguments = {
        "tf_optimizer": "tf.train.GradientDescentOptimizer",
        "learning_rate": 2.0**-13,
    }
    plain = make_trainer(initial, num_towers, **arguments)
    master = make_trainer(initial, num_towers, master_copies=True, **arguments)
    for _ in range(256):
        plain.step(*[feeds] * num_towers)
        master.step(*[feeds] * num_towers)
    for tower in plain.values():
        np.testing.assert_array_equal(np.float32(tower[0]), 1.0)
    for tower in master.values():
        want = np.float32(1 - 256 * 2.0**-13)
        np.testing.assert_array_equal(np.float32(tower[0]), want.astype(dtype))
        np.testing.assert_array_equal(tower[1], want)


def test_a_master_follows_a_variable_that_somebody_assigns(make_trainer):
    trainer = make_trainer([np.ones(2, np.float16)], master_copies=True, **SGD)
    trainer.step([np.float32([1, 1])])
    variable = trainer.towers[0][0]
    if trainer.mode == "graph":
        with trainer.graph.as_default():
            trainer.session.run(variable.assign([5.0, 0.5]))
    else:
        variable.assign([5.0, 0.5])
    trainer.step([np.float32([1, 1])])
    np.testing.assert_array_equal(trainer.values()[0][0], np.float16([4.5, 0.0]))


@pytest.mark.parametrize("multiplier", [None, 3])
def test_reset_brings_back_the_start_but_for_the_scale(make_trainer, multiplier):
    trainer = make_trainer(
        INITIAL,
        2,
        loss_scale=DynamicLossScale(growth_interval=1),
        accumulation_steps=multiplier,
        tf_optimizer="tf.train.RMSPropOptimizer",
        learning_rate=0.1,
    )
    start = trainer.state()
    for m in range(4):
        trainer.step(feeds_like(INITIAL, m), feeds_like(INITIAL, m))
    scale = trainer.statistics()["loss_scaling_log2"]
    assert scale > 15
    trainer.reset()
    assert trainer.statistics()["loss_scaling_log2"] == scale
    assert_same_bits(trainer.state()[1:], start[1:])


def test_a_schedule_sees_the_number_of_updates(make_trainer):
    trainer = make_trainer(
        [np.zeros(1, np.float32)],
        tf_optimizer="tf.train.GradientDescentOptimizer",
        accumulation_steps=2,
        learning_rate=lambda updates: 1.0 / tf.cast(updates + 1, tf.float32),
    )
    values = []
    for grad in (1, 1, np.nan, 1, 1, 1):
        trainer.step([np.float32([grad])])
        values.append(trainer.values()[0][0].item())
    assert values == [0.0, -1.0, -1.0, -1.0, -1.0, -1.5]
    np.testing.assert_allclose(trainer.statistics()["learning_rate"], 1 / 3)
    assert "loss_scaling_log2" not in trainer.statistics()
    assert trainer.optimizer.get_loss_scaling_var("/cpu:0") is None
